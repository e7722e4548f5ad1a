"""Vocabularies of text pieces: SentencePiece with byte fallback (Llama 2, Mistral, Gemma), Metaspace, WordPiece.

The text of a token there depends on little else than the token:

- The first token of a text may differ (no space before it), or the whole text loses spaces at its start.
- A run of byte tokens (`<0x0A>`) is decoded as a whole: valid UTF-8 gives its characters, anything else gives one
  U+FFFD for *each* byte of the run, those of its valid characters included. So nothing of a run is known until it ends.

NOTE: this is why a run is held back until a token of text comes, or the end, however long it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# The chains of decoder steps that keep to these rules. A Strip of the fused text looks at its start alone; it comes
# without the steps that write the first token in another way.
_SUPPORTED_CHAIN = re.compile(
    r"WordPiece (Fuse )?|(Replace |Metaspace )*(ByteFallback )?(Fuse )?|(Replace )*(ByteFallback )?Fuse Strip "
)


class _Decoder(Protocol):
    def decode(self, tokens: list[str]) -> str: ...


@dataclass(frozen=True, slots=True)
class PieceRules:
    """How a tokenizer joins its pieces."""

    has_byte_tokens: bool
    first_differs: bool
    """Whether a token at the start of the text is written in another way than elsewhere."""
    max_lead_spaces: int
    """Spaces that the text loses at its start, at most."""


def piece_rules(steps: Sequence[Mapping[str, object]]) -> PieceRules | None:
    """Return the rules of the decoder with these steps (its JSON, in order); None if tokens do not tell its text."""
    kinds = [str(step["type"]) for step in steps]
    if not _SUPPORTED_CHAIN.fullmatch("".join(f"{kind} " for kind in kinds)):
        return None
    max_lead_spaces = 0
    if kinds and kinds[-1] == "Strip":
        strip = steps[-1]
        if strip["content"] != " " or strip["stop"] != 0:
            return None
        assert isinstance(strip["start"], int)
        max_lead_spaces = strip["start"]
    return PieceRules(
        has_byte_tokens="ByteFallback" in kinds,
        first_differs=not kinds or "Metaspace" in kinds or "WordPiece" in kinds,
        max_lead_spaces=max_lead_spaces,
    )


class PieceDecoding:
    """Asks the tokenizer's own decoder for the text of each token, once."""

    def __init__(
        self, tokens: Sequence[str | None], special_ids: Collection[int], decoder: _Decoder | None, rules: PieceRules
    ) -> None:
        """`tokens[i]` is the token with id i as the vocabulary writes it; without `decoder`, spaces join the tokens."""
        self.rules = rules
        self._tokens = tokens
        self._special_ids = special_ids
        self._decode = " ".join if decoder is None else decoder.decode
        self._pieces: dict[int, str | bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token in the middle of a text; none for an id that the tokenizer lacks."""
        piece = self.piece(token_id)
        return piece if isinstance(piece, bytes) else piece.encode()

    def detokenizer(self, skip_special_tokens: bool) -> PieceDetokenizer:
        """Start an answer."""
        return PieceDetokenizer(self, self._special_ids if skip_special_tokens else ())

    def has(self, token_id: int) -> bool:
        """Whether the tokenizer has a token with this id."""
        return token_id < len(self._tokens) and self._tokens[token_id] is not None

    def piece(self, token_id: int) -> str | bytes:
        """Return the text of a token that is not the first, or the one byte that it stands for."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._find_piece(token_id)
        return piece

    def first_piece(self, token_id: int) -> str | bytes:
        """Return the same for a token that is the first."""
        piece = self.piece(token_id)
        if isinstance(piece, bytes) or not self.rules.first_differs:
            return piece
        token = self._tokens[token_id]
        assert token is not None
        return self._decode([token])

    def _find_piece(self, token_id: int) -> str | bytes:
        token = self._tokens[token_id] if self.has(token_id) else None
        if token is None:
            return ""
        if self.rules.has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return self._decode(["a", token])[len(self._decode(["a"])) :]


class PieceDetokenizer:
    """Holds back a run of byte tokens, and nothing else."""

    def __init__(self, decoding: PieceDecoding, skipped_ids: Collection[int]) -> None:
        self._decoding = decoding
        self._skipped_ids = skipped_ids
        self._started = False
        self._run = bytearray()
        self._max_lead_spaces = decoding.rules.max_lead_spaces

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is certain with these tokens."""
        decoding = self._decoding
        texts = []
        for token_id in token_ids:
            if token_id in self._skipped_ids or not decoding.has(token_id):
                continue
            piece = decoding.piece(token_id) if self._started else decoding.first_piece(token_id)
            self._started = True
            if isinstance(piece, bytes):
                self._run += piece
                continue
            if self._run:
                texts.append(self._end_run())
            texts.append(piece)
        return self._without_lead("".join(texts))

    def finish(self) -> str:
        """Return the text of the run that was held back."""
        return self._without_lead(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _without_lead(self, text: str) -> str:
        while self._max_lead_spaces and text:
            if not text.startswith(" "):
                self._max_lead_spaces = 0
                break
            text = text[1:]
            self._max_lead_spaces -= 1
        return text
