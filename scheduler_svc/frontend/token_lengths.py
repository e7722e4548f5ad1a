"""How much text one token can hold, so that a text which never fits need not be tokenized to know that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from scheduler_svc.frontend.byte_level import BYTE_OF_CHAR

_KEEPS_ALL = ("ByteLevel", "Digits", "Split")
"""Pre-tokenizers that only cut; `Split` if it doesn't remove what it finds."""


def max_token_bytes(tokenizer: Mapping[str, Any], tokens: Iterable[bytes]) -> int | None:
    """The most bytes of a text that one token stands for; None when there may be no limit.

    There is one if nothing of the text can disappear: every byte ends up in some token, which stands for those bytes.
    That holds for byte-level BPE without a normalizer and without added tokens that swallow the space around them.

    Args:
        tokenizer: the content of tokenizer.json.
        tokens: the bytes of each token.

    """
    model, cuts = tokenizer["model"], list(_steps(tokenizer["pre_tokenizer"]))
    keeps_all = (
        tokenizer["normalizer"] is None
        and "ByteLevel" in [cut["type"] for cut in cuts]
        and all(cut["type"] in _KEEPS_ALL and cut.get("behavior") != "Removed" for cut in cuts)
        and model["type"] == "BPE"
        and BYTE_OF_CHAR.keys() <= model["vocab"].keys()
        and not any(token["lstrip"] or token["rstrip"] for token in tokenizer["added_tokens"])
    )
    return max(map(len, tokens)) if keeps_all else None


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return
    if pre_tokenizer["type"] != "Sequence":
        yield pre_tokenizer
        return
    for step in pre_tokenizer["pretokenizers"]:
        yield from _steps(step)
