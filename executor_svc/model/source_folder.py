"""A Hugging Face folder: checked, and given a tokenizer.json where it has an older kind of tokenizer."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import structlog

from everystop.errors import ServiceError, invalid
from executor_svc.model.source_cache import ModelCache

_OLD_TOKENIZER_FILES = ("tokenizer.model", "vocab.json")
_CONVERTED_TOKENIZER_BYTES = 64_000_000

_log = structlog.get_logger()


def usable_folder(folder: Path, cache: ModelCache) -> Path:
    """`folder` itself, or one in the cache that adds a tokenizer.json and links to the rest.

    Raises ServiceError INVALID_ARGUMENT that names what is missing.
    """
    missing = [pattern for pattern in ("config.json", "*.safetensors") if not any(folder.glob(pattern))]
    old_tokenizer = next((folder / name for name in _OLD_TOKENIZER_FILES if (folder / name).is_file()), None)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    if not has_tokenizer and old_tokenizer is None:
        missing.append("tokenizer.json")
    if missing:
        raise invalid("model", f"{folder} has no {' and no '.join(missing)}")
    if has_tokenizer:
        return folder
    assert old_tokenizer is not None
    stat = old_tokenizer.stat()
    identity = hashlib.sha256(f"{folder}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
    return cache.build_once(
        f"{folder.name}-tokenizer-{identity[:16]}", lambda target: _convert(folder, target), _CONVERTED_TOKENIZER_BYTES
    )


def _convert(folder: Path, target: Path) -> None:
    if (folder / "tokenizer.model").is_file() and importlib.util.find_spec("sentencepiece") is None:
        raise _not_convertible(folder, "that needs the sentencepiece package, once; install it")
    # Imported here: several seconds, and only folders without tokenizer.json need it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    _log.info("converting_tokenizer", folder=str(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # every kind of tokenizer fails in its own way
        raise _not_convertible(folder, str(error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise _not_convertible(folder, f"{type(tokenizer).__name__} has no fast form")
    tokenizer.save_pretrained(target)
    for file in folder.iterdir():
        if not (target / file.name).exists():
            (target / file.name).symlink_to(file)


def _not_convertible(folder: Path, why: str) -> ServiceError:
    return invalid("model", f"{folder} has no tokenizer.json, and its tokenizer can't be converted: {why}")
