"""One run: undisturbed answers, then everything at once, then what is left."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import click

from everystop.client import AsyncClient, Retry
from everystop.errors import ServiceError
from everystop_lab.chaos import clients, harm
from everystop_lab.chaos.clients import Attempt, Surroundings
from everystop_lab.chaos.deployment import Deployment
from everystop_lab.chaos.flow import Flow
from everystop_lab.chaos.harm import Tormentor
from everystop_lab.chaos.items import Item, Sizes, undisturbed
from everystop_lab.chaos.report import Report, make_report
from everystop_lab.settling import settled


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is made of."""

    seconds: float
    seed: int
    num_streams: int
    num_items: int
    sizes: Sizes
    num_kills: int
    num_stops: int
    patience_s: float
    """How long a client waits for a sign of life, and a run for its last requests and for a service that was killed."""


async def run(deployment: Deployment, settings: Settings) -> Report:
    """Hurt `deployment` and report.

    Raises ServiceError when it does not answer undisturbed, ClickException when it can't be hurt or stays away.
    """
    retry = Retry(max_elapsed_s=settings.patience_s)
    async with AsyncClient(deployment.address, retry=retry) as client:
        await settled(client, settings.patience_s)
        items = await undisturbed(client, settings.num_items, settings.sizes, settings.seed)
        num_stops = settings.num_stops if deployment.can_stop_executor else 0
        click.echo(
            f"Now {settings.num_streams} streams for {settings.seconds:g} s, with {settings.num_kills} kills of each "
            f"service and {num_stops} stops of the executor",
            err=True,
        )
        rng = random.Random(f"harm {settings.seed}")
        harm_plan = harm.plan(rng, settings.seconds, num_kills=settings.num_kills, num_stops=num_stops)
        flow = Flow()
        tormentor = Tormentor(deployment, rng, flow, settings.patience_s)
        load = Load(Surroundings(client, deployment.address, retry, flow), items, settings)
        await asyncio.gather(asyncio.sleep(settings.seconds), tormentor.run(harm_plan))
        await load.finish()
        try:
            status = await settled(client, settings.patience_s)
        except ServiceError as error:
            raise click.ClickException(f"the scheduler has not come back: {error.message}") from error
    return make_report(load.attempts, status, tormentor.done, deployment.num_unexpected_exits)


class Load:
    """Streams that each send one request after another, from now on."""

    def __init__(self, surroundings: Surroundings, items: list[Item], settings: Settings) -> None:
        self.attempts: list[Attempt] = []
        self._surroundings = surroundings
        self._items = items
        self._patience_s = settings.patience_s
        self._is_over = False
        self._streams = [
            asyncio.create_task(self._stream(random.Random(f"stream {index} {settings.seed}")))
            for index in range(settings.num_streams)
        ]

    async def finish(self) -> None:
        """Send no more, and wait for what is on its way; what takes too long stays without an outcome."""
        self._is_over = True
        _, pending = await asyncio.wait(self._streams, timeout=self._patience_s)
        for stream in pending:
            stream.cancel()
        for ending in await asyncio.gather(*self._streams, return_exceptions=True):
            if isinstance(ending, Exception):  # a bug of ours
                raise ending

    async def _stream(self, rng: random.Random) -> None:
        while not self._is_over:
            attempt = clients.draw(rng, self._items)
            self.attempts.append(attempt)
            await clients.run(attempt, self._surroundings, rng)
