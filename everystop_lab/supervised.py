"""A service of our own that can be hurt: killed or stopped at will, and back at the same address each time."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from everystop.channel import wait_for_address

_PORTS = range(20_000, 32_000)
"""Below the range from which outgoing connections take theirs: else one of them could hold the port of a service while
that is away, and a client that dials in vain could connect to itself."""
_MAX_PORT_TRIES = 100
_GRACE_S = 10.0


def free_port() -> int:
    """A port of the loopback that nothing listens on. Raises OSError when none is found."""
    for port in random.sample(_PORTS, _MAX_PORT_TRIES):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port from {_PORTS.start} to {_PORTS.stop}")


class SupervisedService:
    """One module that serves, run as a child process and started again whenever it ends, until `stop`."""

    def __init__(self, module: str, flags: Sequence[str], folder: Path, log: IO[bytes]) -> None:
        """`folder` is for the file in which it reports its address, `log` takes its output."""
        self.address = f"127.0.0.1:{free_port()}"
        self.ready = asyncio.Event()
        """Set while it listens."""
        self.num_unexpected_exits = 0
        """How often it ended although nobody had killed it."""
        self._address_file = folder / module
        self._command = (
            *(sys.executable, "-m", "everystop.child", str(os.getpid()), module),
            *(f"--listen={self.address}", f"--address-file={self._address_file}", *flags),
        )
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._was_killed = False
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it listens. Raises RuntimeError when it ends instead."""
        await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise())
        listening = asyncio.create_task(self.ready.wait())
        await asyncio.wait({listening, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._supervisor.done():
            self._supervisor.result()

    async def kill(self) -> None:
        """SIGKILL, once it listens."""
        await self.ready.wait()
        self._kill()

    async def halt(self, seconds: float, *, then_kill: bool) -> None:
        """SIGSTOP, once it listens; after `seconds` SIGCONT, or SIGKILL."""
        await self.ready.wait()
        process = self._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        if process.returncode is None and then_kill:
            self._kill()
        elif process.returncode is None:
            process.send_signal(signal.SIGCONT)

    async def stop(self) -> int:
        """SIGTERM, then wait for its end, at most for a while. Returns its exit status."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})
        process = self._process
        if process is None:
            return 0
        if process.returncode is None:
            process.terminate()
        try:
            return await asyncio.wait_for(process.wait(), _GRACE_S)
        except TimeoutError:
            process.kill()
            return await process.wait()

    async def wait_ended(self) -> int:
        """Let it end by itself and not come back. Returns its exit status."""
        assert self._supervisor is not None
        assert self._process is not None
        self._supervisor.cancel()
        return await self._process.wait()

    def _kill(self) -> None:
        assert self._process is not None
        self._was_killed = True
        self.ready.clear()
        self._process.kill()

    async def _supervise(self) -> None:
        """Bring it back, for ever. Raises RuntimeError when it ends before it listens for the first time."""
        has_listened = False
        while True:
            assert self._process is not None
            ended = asyncio.create_task(self._process.wait())
            listening = asyncio.create_task(wait_for_address(self._address_file))
            try:
                await asyncio.wait({ended, listening}, return_when=asyncio.FIRST_COMPLETED)
                if not ended.done():
                    has_listened = True
                    self.ready.set()
                await ended
            finally:
                listening.cancel()
                ended.cancel()
            self.ready.clear()
            if not has_listened:
                raise RuntimeError(f"{self._address_file.name} ended before it listened")
            self.num_unexpected_exits += not self._was_killed
            await self._spawn()

    async def _spawn(self) -> None:
        self._address_file.unlink(missing_ok=True)
        self._was_killed = False
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            process_group=0,  # a terminal's Ctrl-C reaches the parent alone
        )
