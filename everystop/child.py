"""Child processes that never outlive their parent.

`python -m everystop.child PARENT_PID MODULE ARGUMENT…` runs a module as `python -m MODULE ARGUMENT…` would, and is sent
SIGINT when its parent ends, however it ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from typing import IO, Any, TextIO, TypeVar

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class ChildExitedError(Exception):
    """A child ended although nobody asked it to."""

    def __init__(self, name: str, returncode: int, num_times: int = 1) -> None:
        """`num_times`: in a row, before it had even started."""
        again = f", {num_times} times in a row before it listened" if num_times > 1 else ""
        super().__init__(f"the {name} {how_it_ended(returncode)}{again}")
        self.returncode = returncode


def how_it_ended(returncode: int) -> str:
    """An exit status in words, as what follows a subject."""
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"exited with status {returncode}"


async def spawn(
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
) -> asyncio.subprocess.Process:
    """Start `python -m module arguments…`; where nothing else is said, it shares this process's output."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "everystop.child", str(os.getpid()), module, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        process_group=0,  # a terminal's Ctrl-C reaches the parent alone, which then stops them in order
    )


class Children:
    """Processes that are started in order, watched together, and stopped in reverse order."""

    def __init__(self, environment: Mapping[str, str], *, stdout: TextIO | None = None) -> None:
        """`stdout` takes what they print; this process's own when left out."""
        self._environment = environment
        self._stdout = stdout
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, module: str, arguments: Sequence[str]) -> None:
        """Start `python -m module arguments…`."""
        self._processes[name] = await spawn(module, arguments, environment=self._environment, stdout=self._stdout)

    async def until(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`.

        Raises:
            ChildExitedError: a child exits first.

        """
        task = asyncio.create_task(work)
        exits: dict[asyncio.Task[Any], str] = {
            asyncio.create_task(process.wait()): name for name, process in self._processes.items()
        }
        try:
            done, _ = await asyncio.wait({task, *exits}, return_when=asyncio.FIRST_COMPLETED)
            for exited in done & exits.keys():
                raise ChildExitedError(exits[exited], exited.result())
            return task.result()
        finally:
            for pending in (task, *exits):
                pending.cancel()
            await asyncio.gather(task, *exits, return_exceptions=True)

    async def stop(self, grace_s: float, signal_number: signal.Signals = signal.SIGINT) -> None:
        """Ask each to end, the last started first, and kill it if it takes longer than `grace_s` seconds."""
        for process in reversed(self._processes.values()):
            if process.returncode is None:
                process.send_signal(signal_number)
            try:
                await asyncio.wait_for(process.wait(), grace_s)
            except TimeoutError:
                process.kill()
                await process.wait()

    def kill(self) -> None:
        """Kill all at once."""
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()


def _end_with_parent(parent_pid: int) -> None:
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent_pid:  # it ended before it could be watched
        sys.exit(1)


def main() -> None:
    """Run the module that the command line names."""
    parent_pid, module, *arguments = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits that it is ignored
    _end_with_parent(int(parent_pid))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
