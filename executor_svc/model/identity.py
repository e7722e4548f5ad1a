"""What tells one model from another: its tokenizer's files and cheap digests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from executor_svc.model.weights import weight_files

_TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json")
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """Those that the folder has, by name."""
    return {name: (folder / name).read_bytes() for name in _TOKENIZER_FILES if (folder / name).is_file()}


def digest_files(files: Mapping[str, bytes]) -> str:
    """sha256 over names and contents, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return digest.hexdigest()


def fingerprint(folder: Path, tokenizer_digest: str) -> str:
    """sha256 over config, tokenizer, and of each weight file its name, size and samples.

    Samples, since reading every byte would double the time to load: 4 KiB at 64 places, the header at the start among
    them. Other training moves every weight, so two models of one shape differ in all of them.
    """
    digest = hashlib.sha256(tokenizer_digest.encode())
    digest.update((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for sample in range(_NUM_SAMPLES):
                file.seek(size * sample // _NUM_SAMPLES, os.SEEK_SET)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
