"""When which service is hurt."""

from __future__ import annotations

import asyncio
import enum
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import click

from everystop_lab.chaos.deployment import Deployment
from everystop_lab.chaos.flow import Flow

_SHARE_OF_TIME = 0.85
"""No harm is planned for the rest: what the last scheduler holds in the end is to be seen."""

_SHARE_AT_WORK = 0.5
"""Of the harm that waits until every answer flows; the rest may hit a service that is about to come back.

NOTE: never twice in a row. A request whose executor is lost three times at the same step is given up by the scheduler,
and rightly so; no request here is to blame.
"""


class Harm(enum.Enum):
    """What is done to a service."""

    KILL_EXECUTOR = "killing the executor"
    STOP_EXECUTOR = "stopping the executor"
    KILL_SCHEDULER = "killing the scheduler"


@dataclass(slots=True)
class HarmDone:
    """How often, so far."""

    executor_kills: int = 0
    executor_stops: int = 0
    """Those that were killed in the end included."""
    scheduler_kills: int = 0


@dataclass(frozen=True, slots=True)
class HarmPlan:
    """Moments, in seconds from the start, and what happens then, in order."""

    executor: list[tuple[float, Harm]]
    scheduler: list[tuple[float, Harm]]


def plan(rng: random.Random, seconds: float, *, num_kills: int, num_stops: int) -> HarmPlan:
    """Spread `num_kills` of each service and `num_stops` of the executor evenly at random over most of `seconds`."""

    def at_random(harms: Counter[Harm]) -> list[tuple[float, Harm]]:
        return sorted(
            ((rng.uniform(0, _SHARE_OF_TIME * seconds), harm) for harm in harms.elements()),
            key=lambda moment: moment[0],
        )

    return HarmPlan(
        executor=at_random(Counter({Harm.KILL_EXECUTOR: num_kills, Harm.STOP_EXECUTOR: num_stops})),
        scheduler=at_random(Counter({Harm.KILL_SCHEDULER: num_kills})),
    )


@dataclass(slots=True)
class Tormentor:
    """Carries a plan out. The two services are hurt independently, so also both at once."""

    deployment: Deployment
    rng: random.Random
    flow: Flow
    patience_s: float
    """How long a service may take to come back before it can be hurt again."""
    done: HarmDone = field(default_factory=HarmDone)

    async def run(self, harm_plan: HarmPlan) -> None:
        """Return when all is done, late if the services take longer to come back than the plan has thought.

        Raises ClickException when one does not come back, or can't be hurt.
        """
        await asyncio.gather(self._walk(harm_plan.executor), self._walk(harm_plan.scheduler))

    async def _walk(self, moments: Sequence[tuple[float, Harm]]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        waits = True
        for seconds, harm in moments:
            await asyncio.sleep(max(0.0, started + seconds - loop.time()))
            waits = not waits or self.rng.random() < _SHARE_AT_WORK
            if waits:
                await self.flow.all_moved(self.patience_s)
            try:
                async with asyncio.timeout(self.patience_s):
                    await self._do(harm)
            except TimeoutError as error:
                raise click.ClickException(f"{harm.value}: not possible within {self.patience_s:g} s") from error

    async def _do(self, harm: Harm) -> None:
        match harm:
            case Harm.KILL_EXECUTOR:
                await self.deployment.kill_executor()
                self.done.executor_kills += 1
            case Harm.STOP_EXECUTOR:
                self.done.executor_kills += await self.deployment.stop_executor(self.rng)
                self.done.executor_stops += 1
            case Harm.KILL_SCHEDULER:
                await self.deployment.kill_scheduler()
                self.done.scheduler_kills += 1
