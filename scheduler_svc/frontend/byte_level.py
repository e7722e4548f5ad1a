"""Byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM): each token is bytes, and the text is their UTF-8."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence


def _byte_of_char() -> dict[str, int]:
    """The alphabet of such a vocabulary: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


def _bytes_of_token(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token, written as plain text
        return token.encode()


class ByteLevelDecoding:
    """One table from id to bytes, built once."""

    def __init__(self, tokens: Sequence[str | None], special_ids: Collection[int]) -> None:
        """`tokens[i]` is the token with id i as the vocabulary writes it; None where there is none."""
        self._table = [b"" if token is None else _bytes_of_token(token) for token in tokens]
        self._table_without_special = [b"" if i in special_ids else entry for i, entry in enumerate(self._table)]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; none for an id that the tokenizer lacks."""
        return self._table[token_id] if token_id < len(self._table) else b""

    def detokenizer(self, skip_special_tokens: bool) -> ByteLevelDetokenizer:
        """Start an answer."""
        return ByteLevelDetokenizer(self._table_without_special if skip_special_tokens else self._table)


class ByteLevelDetokenizer:
    """Holds back at most the three bytes of an unfinished character."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        # Replaces what can't become a character as the tokenizers library does: one U+FFFD per maximal invalid part.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the characters that are complete with these tokens."""
        table = self._table
        return self._utf8.decode(b"".join([table[i] for i in token_ids if i < len(table)]))

    def finish(self) -> str:
        """Return U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)
