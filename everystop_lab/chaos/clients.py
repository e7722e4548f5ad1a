"""The ways in which clients behave: well, impatiently, slowly, and not at all."""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import grpc

from everystop.client import AsyncClient, Retry
from everystop.errors import ServiceError
from everystop_lab.chaos.flow import Flow
from everystop_lab.chaos.items import Item
from everystop_lab.chaos.observation import Observation
from everystop_lab.chaos.proxy import proxy_to

_MAX_SLOW_PAUSE_S = 0.1
_MAX_EVENTS_BEFORE_CUT = 20


class Outcome(enum.StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    VANISHED = "vanished"
    """Its client went without a word."""
    LOST = "lost"
    """It should have completed, and did not."""


@dataclass(slots=True)
class Attempt:
    """One request on its way."""

    item: Item
    behaviour: str
    seen: Observation = field(default_factory=Observation)
    outcome: Outcome | None = None
    """None until it has ended."""
    error: ServiceError | None = None

    @property
    def is_paced_by_client(self) -> bool:
        """Whether its pauses are its client's own."""
        return self.behaviour == "slow"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What clients need besides their request."""

    client: AsyncClient
    address: str
    retry: Retry
    flow: Flow


Behaviour = Callable[[Attempt, Surroundings, random.Random], Awaitable[Outcome]]


async def run(attempt: Attempt, surroundings: Surroundings, rng: random.Random) -> None:
    """Send the request as its client behaves; afterwards `attempt` says how it ended. Raises nothing that gRPC does."""
    try:
        with surroundings.flow.running(attempt.seen):
            attempt.outcome = await BEHAVIOURS[attempt.behaviour](attempt, surroundings, rng)
    except ServiceError as error:
        attempt.outcome, attempt.error = Outcome.LOST, error


async def _steady(attempt: Attempt, surroundings: Surroundings, _rng: random.Random) -> Outcome:
    return await _read(attempt, surroundings)


async def _slow(attempt: Attempt, surroundings: Surroundings, rng: random.Random) -> Outcome:
    return await _read(attempt, surroundings, pause_s=lambda: rng.uniform(0, _MAX_SLOW_PAUSE_S))


async def _cancel(attempt: Attempt, surroundings: Surroundings, rng: random.Random) -> Outcome:
    """Break off after a while, which may be before the first event."""
    try:
        async with asyncio.timeout(_some_time_s(attempt, rng)):
            return await _read(attempt, surroundings)
    except TimeoutError:
        return Outcome.CANCELLED


async def _deadline(attempt: Attempt, surroundings: Surroundings, rng: random.Random) -> Outcome:
    try:
        return await _read(attempt, surroundings, timeout=_some_time_s(attempt, rng))
    except ServiceError as error:
        # A client whose scheduler is away gives up with that error when there is no time for another try.
        if error.code not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            raise
        return Outcome.DEADLINE_EXCEEDED


async def _cut(attempt: Attempt, surroundings: Surroundings, rng: random.Random) -> Outcome:
    """Lose the connection, and go on over another one."""
    async with (
        proxy_to(surroundings.address) as proxy,
        AsyncClient(proxy.address, retry=surroundings.retry) as client,
    ):
        return await _read(
            attempt,
            replace(surroundings, client=client),
            after_event={rng.randrange(_MAX_EVENTS_BEFORE_CUT): proxy.cut},
        )


async def _vanish(attempt: Attempt, surroundings: Surroundings, rng: random.Random) -> Outcome:
    """Lose the connection and never come back."""
    async with proxy_to(surroundings.address) as proxy, AsyncClient(proxy.address, retry=None) as client:
        try:
            return await _read(
                attempt,
                replace(surroundings, client=client),
                after_event={rng.randrange(_MAX_EVENTS_BEFORE_CUT): proxy.cut},
            )
        except ServiceError as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise
            return Outcome.VANISHED


BEHAVIOURS: dict[str, Behaviour] = {
    "steady": _steady,
    "slow": _slow,
    "cancel": _cancel,
    "deadline": _deadline,
    "cut": _cut,
    "vanish": _vanish,
}
SHARES = {"steady": 10, "slow": 2, "cancel": 3, "deadline": 2, "cut": 2, "vanish": 1}
"""How often each of them is drawn, relative to the others."""


def draw(rng: random.Random, items: list[Item]) -> Attempt:
    """The next request of a client."""
    [behaviour] = rng.choices(list(SHARES), list(SHARES.values()))
    return Attempt(rng.choice(items), behaviour)


async def _read(
    attempt: Attempt,
    surroundings: Surroundings,
    *,
    timeout: float | None = None,  # noqa: ASYNC109  # it is sent along
    pause_s: Callable[[], float] | None = None,
    after_event: dict[int, Callable[[], None]] | None = None,
) -> Outcome:
    """Read the stream to its end."""
    stream = surroundings.client.generate(attempt.item.prompt, timeout=timeout, **attempt.item.options)
    async with aclosing(stream):
        async for event in stream:
            attempt.seen.take(event)
            surroundings.flow.move()
            if after_event is not None and attempt.seen.num_events - 1 in after_event:
                after_event[attempt.seen.num_events - 1]()
            if pause_s is not None:
                await asyncio.sleep(pause_s())
    return Outcome.COMPLETED if attempt.seen.finished is not None else Outcome.LOST


def _some_time_s(attempt: Attempt, rng: random.Random) -> float:
    """From nothing up to twice as long as the answer took alone: in the queue, in prefill, in decode, or too late."""
    return attempt.item.answer_s * rng.uniform(0, 2)
