"""The cache of models: folders that are built once, whole or not at all, whoever asks at the same time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog
from filelock import AcquireReturnProxy, FileLock, Timeout

from everystop.errors import Reason, ServiceError

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ModelCache:
    """Folders by key under `root`. Safe between threads and processes."""

    root: Path

    @classmethod
    def at(cls, cache_dir: Path | None) -> ModelCache:
        """The cache in `cache_dir`, or where the environment puts it."""
        if cache_dir is not None:
            return cls(cache_dir / "models")
        if own := os.environ.get("EVERYSTOP_CACHE"):
            return cls(Path(own).expanduser() / "models")
        base = os.environ.get("XDG_CACHE_HOME")
        return cls((Path(base) if base else Path.home() / ".cache") / "everystop" / "models")

    def build_once(self, key: str, build: Callable[[Path], None], needed_bytes: int) -> Path:
        """The folder of `key`; `build(folder)` fills an empty one when there is none yet.

        The folder appears only once `build` has returned: it is filled under another name and renamed. One process
        builds, others wait for it. Whatever a killed process left behind is thrown away by the next builder.
        """
        target = self.root / key
        # Before the lock, so that a finished model can be served from a read-only cache.
        if target.is_dir():
            return target
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with _locked(self.root / f"{key}.lock"):
                if not target.is_dir():
                    self._build(target, build, needed_bytes)
        except OSError as error:
            raise _unusable(self.root, str(error)) from error
        return target

    def _build(self, target: Path, build: Callable[[Path], None], needed_bytes: int) -> None:
        partial = target.with_name(f"{target.name}.partial")
        if partial.exists():
            shutil.rmtree(partial)
        free_bytes = shutil.disk_usage(self.root).free
        if free_bytes < needed_bytes:
            raise _unusable(self.root, f"needs {needed_bytes / 1e9:.1f} GB free on disk, has {free_bytes / 1e9:.1f} GB")
        partial.mkdir()
        try:
            build(partial)
            partial.rename(target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _locked(path: Path) -> AcquireReturnProxy[FileLock]:
    """The lock at `path`, held until the context ends; says so before it waits for another process."""
    lock = FileLock(path)
    try:
        return lock.acquire(blocking=False)
    except Timeout:
        _log.info("waiting_for_other_process", lock=str(path))
        return lock.acquire()


def _unusable(root: Path, why: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        Reason.INTERNAL,
        f"can't prepare the model in {root}: {why}; EVERYSTOP_CACHE names another place",
    )
