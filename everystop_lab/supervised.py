"""A service of our own that can be hurt: killed or stopped at will, and back at the same address each time."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from everystop.supervision import Service, SupervisedProcess, free_port

_GRACE_S = 10.0


class SupervisedService(SupervisedProcess):
    """One module that serves, run as a child process and started again, at once, whenever it ends, until `stop`."""

    def __init__(self, module: str, flags: Sequence[str], folder: Path, log: IO[bytes]) -> None:
        """`folder` is for the file in which it reports its address, `log` takes its output."""
        super().__init__(
            Service(
                name=module,
                module=module,
                flags=flags,
                listen=f"127.0.0.1:{free_port()}",
                address_file=folder / module,
                output=log,
                max_restart_delay_s=0.0,
            )
        )
        self.num_unexpected_exits = 0
        """How often it ended although nobody had killed it."""
        self._was_killed = False

    async def kill(self) -> None:
        """SIGKILL, once it listens."""
        await self.ready.wait()
        self._kill()

    async def halt(self, seconds: float, *, then_kill: bool) -> None:
        """SIGSTOP, once it listens; after `seconds` SIGCONT, or SIGKILL."""
        await self.ready.wait()
        process = self._running
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        if process.returncode is None and then_kill:
            self._kill()
        elif process.returncode is None:
            process.send_signal(signal.SIGCONT)

    async def stop(self, signal_number: signal.Signals = signal.SIGTERM, grace_s: float = _GRACE_S) -> int:
        """Ask it to end, and kill it if that takes longer than `grace_s` seconds. Returns its exit status."""
        return await super().stop(signal_number, grace_s)

    def _note_end(self) -> None:
        self.num_unexpected_exits += not self._was_killed
        self._was_killed = False

    def _kill(self) -> None:
        self._was_killed = True
        self.ready.clear()
        self._running.kill()
