import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from everystop.child import ChildExitedError, Children


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A folder of modules that children can run."""
    (tmp_path / "obedient.py").write_text(
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(pathlib.Path(sys.argv[2]).write_text(sys.argv[0]) and 0))\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while True: signal.pause()\n"
    )
    (tmp_path / "stubborn.py").write_text(
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "while True: signal.pause()\n"
    )
    (tmp_path / "patient.py").write_text(
        "import pathlib, signal, sys\n"
        "try:\n"
        "    pathlib.Path(sys.argv[1]).touch()\n"
        "    signal.pause()\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(5)\n"
    )
    (tmp_path / "failing.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    return tmp_path


@pytest.fixture
def children(modules: Path) -> Children:
    return Children({**os.environ, "PYTHONPATH": str(modules)})


async def appears(file: Path) -> None:
    while not file.exists():
        await asyncio.sleep(0.01)


async def test_a_child_runs_as_a_module_with_its_arguments_and_stops(children: Children, tmp_path: Path) -> None:
    ready, ended = tmp_path / "ready", tmp_path / "ended"
    await children.start("child", "obedient", [str(ready), str(ended)])
    await children.until(appears(ready))
    await children.stop(grace_s=10)
    assert Path(ended.read_text()).name == "obedient.py"


async def test_a_child_that_ignores_the_request_is_killed(children: Children, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    await children.start("child", "stubborn", [str(ready)])
    await children.until(appears(ready))
    await children.stop(grace_s=0.1)
    with pytest.raises(ChildExitedError, match="the child was killed by SIGKILL"):
        await children.until(asyncio.Event().wait())


async def test_the_signal_can_be_chosen(children: Children, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    await children.start("child", "stubborn", [str(ready)])
    await children.until(appears(ready))
    await children.stop(10, signal.SIGTERM)
    with pytest.raises(ChildExitedError, match="the child was killed by SIGTERM"):
        await children.until(asyncio.Event().wait())


async def test_a_child_hears_ctrl_c_although_the_shell_ignores_it(children: Children, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        await children.start("child", "patient", [str(ready)])
    finally:
        signal.signal(signal.SIGINT, ignored)
    await children.until(appears(ready))
    await children.stop(10)
    with pytest.raises(ChildExitedError, match="the child exited with status 5"):
        await children.until(asyncio.Event().wait())


async def test_an_exit_ends_the_wait_with_the_reason(children: Children) -> None:
    await children.start("child", "failing", ["3"])
    with pytest.raises(ChildExitedError, match="the child exited with status 3"):
        await children.until(asyncio.Event().wait())


async def test_errors_of_the_work_come_through(children: Children) -> None:
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await children.until(fail())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
async def test_a_child_ends_when_its_parent_is_killed(modules: Path, tmp_path: Path) -> None:
    ready, ended = tmp_path / "ready", tmp_path / "ended"
    parent_code = f"""
        import asyncio, os, pathlib
        from everystop.child import Children

        async def main():
            children = Children(os.environ)
            await children.start("child", "obedient", [{str(ready)!r}, {str(ended)!r}])
            await asyncio.Event().wait()

        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent_code)], env={**os.environ, "PYTHONPATH": str(modules)}
    )
    await asyncio.wait_for(appears(ready), 30)
    (child,) = psutil.Process(parent.pid).children()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    await asyncio.wait_for(appears(ended), 30)
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()
