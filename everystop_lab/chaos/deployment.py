"""What is hurt: services of our own, or somebody's deployment through commands."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Protocol

import click

from everystop_lab.own_services import OwnServices

_KILL_SHARE = 0.3
"""Of the executors that are stopped, those that are killed instead of continued."""


class Deployment(Protocol):
    """A scheduler and an executor that come back by themselves."""

    @property
    def address(self) -> str:
        """Where clients reach the scheduler."""

    @property
    def can_stop_executor(self) -> bool:
        """Whether `stop_executor` works."""

    @property
    def num_unexpected_exits(self) -> int:
        """How often a service ended by itself."""

    async def kill_executor(self) -> None:
        """End it without warning."""

    async def stop_executor(self, rng: random.Random) -> bool:
        """Stop it for a while in the midst of whatever it does; whether it was killed afterwards."""

    async def kill_scheduler(self) -> None:
        """End it without warning."""


class OwnDeployment:
    """Two processes of this one."""

    can_stop_executor = True

    def __init__(self, services: OwnServices, max_stop_s: float) -> None:
        self._services = services
        self._max_stop_s = max_stop_s

    @property
    def address(self) -> str:
        """The scheduler's."""
        return self._services.address

    @property
    def num_unexpected_exits(self) -> int:
        """Of both."""
        return self._services.executor.num_unexpected_exits + self._services.scheduler.num_unexpected_exits

    async def kill_executor(self) -> None:
        """SIGKILL, once it listens."""
        await self._services.executor.kill()

    async def stop_executor(self, rng: random.Random) -> bool:
        """SIGSTOP, once it listens."""
        then_kill = rng.random() < _KILL_SHARE
        await self._services.executor.halt(rng.uniform(0, self._max_stop_s), then_kill=then_kill)
        return then_kill

    async def kill_scheduler(self) -> None:
        """SIGKILL, once it listens."""
        await self._services.scheduler.kill()


@dataclass(frozen=True, slots=True)
class Commands:
    """Somebody's deployment: a shell command for each kind of harm."""

    address: str
    kill_executor_command: str
    kill_scheduler_command: str
    can_stop_executor: bool = False
    num_unexpected_exits: int = 0

    async def kill_executor(self) -> None:
        """Raises ClickException when the command fails."""
        await _run(self.kill_executor_command)

    async def stop_executor(self, rng: random.Random) -> bool:
        """Not here."""
        raise NotImplementedError

    async def kill_scheduler(self) -> None:
        """Raises ClickException when the command fails."""
        await _run(self.kill_scheduler_command)


async def _run(command: str) -> None:
    process = await asyncio.create_subprocess_shell(command, stdout=asyncio.subprocess.DEVNULL)
    if status := await process.wait():
        raise click.ClickException(f"{command!r} ended with status {status}")
