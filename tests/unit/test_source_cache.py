"""The cache of models: built once, whole or not at all."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from everystop.errors import ServiceError
from executor_svc.model.source_cache import ModelCache

# Builds "key" in the cache argv[1], notes each build as a file, and in the middle of it waits for a line on stdin.
_BUILDER = """
import sys, tempfile
from pathlib import Path
from executor_svc.model.source_cache import ModelCache
root = Path(sys.argv[1])
def build(folder):
    tempfile.mkstemp(prefix="build-", dir=root)
    (folder / "first").write_text("whole")
    print("building", flush=True)
    sys.stdin.readline()
    (folder / "second").write_text("whole")
ModelCache(root).build_once("key", build, 0)
print("built", flush=True)
"""


def _start_builder(root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _BUILDER, str(root)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"ended without {text!r}")


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    first = _start_builder(tmp_path)
    _read_until(first, "building")
    second = _start_builder(tmp_path)
    _read_until(second, "waiting_for_other_process")
    first.communicate("\n")
    second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert len(list(tmp_path.glob("build-*"))) == 1
    assert {file.name for file in (tmp_path / "key").iterdir()} == {"first", "second"}


def test_killed_builder_leaves_no_model_and_the_next_one_starts_afresh(tmp_path: Path) -> None:
    killed = _start_builder(tmp_path)
    _read_until(killed, "building")
    assert not (tmp_path / "key").exists()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "key").exists()

    def build(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "second").touch()

    folder = ModelCache(tmp_path).build_once("key", build, 0)
    assert {file.name for file in folder.iterdir()} == {"second"}


def test_failed_build_leaves_nothing_and_passes_its_error_on(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ModelCache(tmp_path).build_once("key", build, 0)
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == []


def test_second_call_builds_nothing_and_takes_no_lock(tmp_path: Path) -> None:
    cache = ModelCache(tmp_path)
    folder = cache.build_once("key", lambda folder: (folder / "file").touch(), 0)
    (tmp_path / "key.lock").unlink(missing_ok=True)
    assert cache.build_once("key", lambda _: pytest.fail("built twice"), 0) == folder
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


def test_too_little_disk_is_said_before_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000_000))
    with pytest.raises(ServiceError, match=r"needs 2\.5 GB free on disk, has 1\.0 GB; EVERYSTOP_CACHE") as caught:
        ModelCache(tmp_path).build_once("key", lambda _: pytest.fail("built"), 2_500_000_000)
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION


def test_full_disk_during_the_build_names_the_cache(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        raise OSError(28, os.strerror(28), str(folder / "model.safetensors"))

    with pytest.raises(ServiceError, match="No space left on device") as caught:
        ModelCache(tmp_path).build_once("key", build, 0)
    assert str(tmp_path) in caught.value.message
    assert not (tmp_path / "key.partial").exists()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"EVERYSTOP_CACHE": "/own", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"}, "/own/models"),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"}, "/xdg/everystop/models"),
        ({"HOME": "/home/me"}, "/home/me/.cache/everystop/models"),
    ],
)
def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str) -> None:
    for name in ("EVERYSTOP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ModelCache.at(None).root == Path(expected)
    assert ModelCache.at(Path("/given")).root == Path("/given/models")
