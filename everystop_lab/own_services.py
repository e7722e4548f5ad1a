"""A scheduler and an executor of our own, each in a process that can be measured and hurt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from everystop_lab.supervised import SupervisedService


@dataclass(frozen=True, slots=True)
class OwnServices:
    """Both of them."""

    executor: SupervisedService
    scheduler: SupervisedService

    @property
    def address(self) -> str:
        """Where clients reach the scheduler."""
        return self.scheduler.address


@asynccontextmanager
async def own_services(
    executor_flags: Sequence[str], scheduler_flags: Sequence[str], *, folder: Path, log: IO[bytes]
) -> AsyncIterator[OwnServices]:
    """Run both until the block ends; `folder` is for files of theirs. Raises ChildExitedError if one fails to start."""
    executor = SupervisedService("executor_svc", executor_flags, folder, log)
    scheduler_flags = [f"--executor-address={executor.address}", *scheduler_flags]
    scheduler = SupervisedService("scheduler_svc", scheduler_flags, folder, log)
    try:
        await executor.start()
        await scheduler.start()
        yield OwnServices(executor, scheduler)
    finally:
        await scheduler.stop()
        await executor.stop()
