"""How token ids turn into text while they come, one token at a time.

A `Decoding` belongs to a tokenizer and is shared; a `Detokenizer` belongs to one answer. There is one kind for
byte-level vocabularies and one for pieces of text; both cost the same for the last token as for the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """The text of one answer. All texts put together equal the answer decoded at once."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the characters that are complete with these tokens. Ids that the tokenizer lacks have no text."""
        ...

    def finish(self) -> str:
        """Return the rest; bytes that make no character become U+FFFD. Nothing comes after it."""
        ...


class Decoding(Protocol):
    """What a tokenizer's tokens stand for."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token in the middle of a text; none for an id that the tokenizer lacks."""
        ...

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """Start an answer. `skip_special_tokens` leaves them out of the text."""
        ...
