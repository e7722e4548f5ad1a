"""Services as child processes that come back, at the same address, whenever they end or hang."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from everystop.backoff import Backoff
from everystop.channel import client_channel, reachable, wait_for_address
from everystop.child import ChildExitedError, how_it_ended, spawn

T = TypeVar("T")

MAX_FAILED_STARTS = 5
"""Ends in a row before it listens, after which a service that has run before is given up."""

_STABLE_S = 10.0
"""A service that was up for this long is started again without much delay."""
_MISSED_CHECKS = 2
"""Health checks in a row: one may time out only because this process itself was stopped for a while."""
_CHECK_INTERVAL_S = 1.0

_PORTS = range(20_000, 32_000)
"""Below the range from which outgoing connections take theirs: else one of them could hold the port of a service while
that is away, and a client that dials in vain could connect to itself."""
_MAX_PORT_TRIES = 100

log = structlog.get_logger()


def free_port() -> int:
    """A port of this machine that nothing listens on. Raises OSError when none is found."""
    for port in random.sample(_PORTS, _MAX_PORT_TRIES):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError(f"no free port from {_PORTS.start} to {_PORTS.stop}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What to run, and how to look after it."""

    name: str
    """For log lines and errors."""
    module: str
    flags: Sequence[str]
    """Settings, but for those that follow."""
    listen: str
    """host:port, and no port 0: it must be found there again."""
    address_file: Path
    """Where it says that it listens."""
    output: IO[bytes] | None = None
    """Takes what it prints; it shares this process's output when left out."""
    environment: Mapping[str, str] | None = None
    """This process's own when left out."""
    max_restart_delay_s: float = 5.0
    hung_after_s: float | None = None
    """Seconds without an answer to health checks after which it is killed; None checks nothing."""
    ends_with_success: bool = False
    """Whether it stays away once it has ended with status 0: it was asked to."""


class SupervisedProcess:
    """A service as a child process that is started again whenever it ends or hangs, until `stop`."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.ready = asyncio.Event()
        """Set while it listens."""
        self._process: Process | None = None
        self._supervisor: asyncio.Task[NoReturn] | None = None
        self._went_down_at: float | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.service.listen

    @property
    def pid(self) -> int:
        """Of the process that ran last."""
        return self._running.pid

    async def start(self) -> None:
        """Start it and wait until it listens. Raises ChildExitedError when it ends instead."""
        self._process = await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise())
        await self.until(self.ready.wait())

    async def until(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`, through any number of restarts. Raises ChildExitedError when the service is given up."""
        assert self._supervisor is not None
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._supervisor}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else self._supervisor.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self, signal_number: signal.Signals, grace_s: float) -> int:
        """Ask it to end, and kill it if that takes longer than `grace_s` seconds. Returns its exit status."""
        await self._leave_alone()
        process = self._process
        if process is None:
            return 0
        if process.returncode is None:
            process.send_signal(signal_number)
        try:
            return await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            process.kill()
            return await process.wait()

    async def wait_ended(self) -> int:
        """Let it end by itself and not come back. Returns its exit status."""
        await self._leave_alone()
        return await self._running.wait()

    def kill_for_good(self) -> None:
        """SIGKILL, and it does not come back."""
        if self._supervisor is not None:
            self._supervisor.cancel()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _note_end(self) -> None:
        """For subclasses: it has ended, whyever, and will come back or be given up."""

    @property
    def _running(self) -> Process:
        assert self._process is not None
        return self._process

    async def _leave_alone(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    async def _supervise(self) -> NoReturn:
        """Bring it back, again and again. Raises ChildExitedError when that makes no sense or is not wanted."""
        service, backoff = self.service, Backoff(self.service.max_restart_delay_s)
        num_failed_starts, has_listened = 0, False
        while True:
            up_s = await self._live()
            self._note_end()
            num_failed_starts = num_failed_starts + 1 if up_s is None else 0
            has_listened = has_listened or up_s is not None
            returncode = self._running.returncode
            assert returncode is not None
            is_wanted = returncode != 0 or not service.ends_with_success
            if not (has_listened and is_wanted and num_failed_starts < MAX_FAILED_STARTS):
                raise ChildExitedError(service.name, returncode, max(num_failed_starts, 1))
            delay_s = backoff.next_delay_s(was_useful=up_s is not None and up_s >= _STABLE_S)
            log.warning(
                "service_ended",
                service=service.name,
                pid=self.pid,
                reason=how_it_ended(returncode),
                up_s=None if up_s is None else round(up_s, 1),
                restart_in_s=round(delay_s, 2),
            )
            await asyncio.sleep(delay_s)
            self._process = await self._spawn()

    async def _spawn(self) -> Process:
        service = self.service
        service.address_file.unlink(missing_ok=True)
        return await spawn(
            service.module,
            [*service.flags, f"--listen={service.listen}", f"--address-file={service.address_file}"],
            environment=os.environ if service.environment is None else service.environment,
            stdout=service.output,
            stderr=service.output,
        )

    async def _live(self) -> float | None:
        """Wait until the process has ended. Returns for how many seconds it was up, None if it never listened."""
        loop, process = asyncio.get_running_loop(), self._running
        ended = asyncio.create_task(process.wait())
        listening = asyncio.create_task(wait_for_address(self.service.address_file))
        hanging = asyncio.create_task(self._hanging(listening))
        try:
            await asyncio.wait({ended, listening}, return_when=asyncio.FIRST_COMPLETED)
            if not listening.done():
                return None
            up_at = loop.time()
            self._note_up(up_at)
            await asyncio.wait({ended, hanging}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                hanging.result()
                log.error("service_hung", service=self.service.name, pid=process.pid)
                process.kill()
            await ended
            self._went_down_at = loop.time()
            return self._went_down_at - up_at
        finally:
            self.ready.clear()
            tasks = (ended, listening, hanging)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _note_up(self, now: float) -> None:
        self.ready.set()
        if self._went_down_at is not None:
            down_ms = round((now - self._went_down_at) * 1e3)
            log.info("service_restarted", service=self.service.name, pid=self.pid, down_ms=down_ms)

    async def _hanging(self, listening: asyncio.Task[str]) -> None:
        """Return once it has listened and then stopped to answer.

        One that still loads its model, or computes a long step, is not hung: the answer comes from its event loop.
        """
        if self.service.hung_after_s is None:
            await asyncio.Event().wait()
            return
        await asyncio.wait({listening})
        timeout_s = self.service.hung_after_s / _MISSED_CHECKS
        async with client_channel(reachable(self.address)) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]  # the stubs lack it
            num_missed = 0
            while num_missed < _MISSED_CHECKS:
                try:
                    await check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
                except grpc.aio.AioRpcError as error:
                    # Whatever else is wrong is an answer, or the process has ended.
                    is_silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                    num_missed = num_missed + 1 if is_silent else 0
                else:
                    num_missed = 0
                if not num_missed:
                    await asyncio.sleep(_CHECK_INTERVAL_S)
