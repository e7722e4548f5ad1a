"""Where a model comes from: the default, a folder, a GGUF file or the Hugging Face hub, all ending as one folder.

`python -m executor_svc.model.source [MODEL]` prepares a model ahead of time and prints its folder.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import click
import structlog

from everystop import log
from everystop.errors import ServiceError, invalid
from executor_svc.model import source_default
from executor_svc.model.source_cache import ModelCache
from executor_svc.model.source_folder import usable_folder
from executor_svc.model.source_hub import download_from_hub

DEFAULT_MODEL = "default"

_CONVERTER_VERSION = 1
"""Part of every key, so that a folder from an older converter is never mistaken for today's."""
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is ready to load."""

    path: Path
    """A Hugging Face folder: config.json, *.safetensors and tokenizer.json at least."""
    name: str
    """What clients are told: a hub id, or the name of a folder or file."""


def resolve(model: str, cache_dir: Path | None = None) -> ResolvedModel:
    """The folder of `model`, fetched and converted once if need be.

    `model` is "default" (SmolLM2-135M-Instruct), a Hugging Face folder, a GGUF file, or a hub id `org/name[@revision]`.
    What had to be built is kept in `cache_dir`, by default `$EVERYSTOP_CACHE`, `$XDG_CACHE_HOME/everystop` or
    `~/.cache/everystop`. Raises ServiceError: INVALID_ARGUMENT for a model that can't be served, UNAVAILABLE when it
    can't be fetched, FAILED_PRECONDITION when the cache can't take it.
    """
    cache = ModelCache.at(cache_dir)
    if model == DEFAULT_MODEL:
        key = f"{source_default.KEY}-v{_CONVERTER_VERSION}"
        folder = cache.build_once(key, source_default.build, source_default.NEEDED_BYTES)
        return ResolvedModel(folder, source_default.NAME)
    path = Path(model).expanduser()
    if path.is_dir():
        path = path.resolve()
        return ResolvedModel(usable_folder(path, cache), path.name)
    if path.is_file():
        return ResolvedModel(_converted_gguf(path.resolve(), cache), path.stem)
    if hub_id := _HUB_ID.fullmatch(model):
        folder = download_from_hub(hub_id["repo"], hub_id["revision"])
        return ResolvedModel(usable_folder(folder, cache), model)
    raise invalid(
        "model",
        f"{model!r} is no folder, no file and no hub id; give 'default', a folder, a .gguf file or org/name[@revision]",
    )


def _converted_gguf(path: Path, cache: ModelCache) -> Path:
    if path.suffix != ".gguf":
        raise invalid("model", f"{path} is a file but not .gguf; give the folder that holds config.json and weights")
    # Size and time instead of a digest: reading many gigabytes at every start would cost more than loading them.
    stat = path.stat()
    identity = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()

    def build(folder: Path) -> None:
        # Imported here: the converter pulls in torch, which a model that is already converted does not need.
        from executor_svc.model.gguf_convert import convert_gguf

        _log.info("converting_model", file=str(path))
        convert_gguf(path, folder)

    # The file's size is the least that the folder takes: weights keep their width or grow.
    return cache.build_once(f"{path.stem}-{identity[:16]}-v{_CONVERTER_VERSION}", build, stat.st_size)


@click.command()
@click.argument("model", default=DEFAULT_MODEL)
def main(model: str) -> None:
    """Fetch and convert MODEL if need be, and print its folder."""
    log.configure("auto", "info")  # to stderr: standard output carries the folder and nothing else
    try:
        click.echo(resolve(model).path)
    except ServiceError as error:
        raise click.ClickException(error.message) from error


if __name__ == "__main__":
    main()
