"""`everystop soak`: a great many requests through real processes, and what those hold afterwards."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import click

from everystop import log
from everystop.channel import client_channel
from everystop.client import AsyncClient, Delta, Finished
from everystop.scheduler.v1 import admin_pb2, admin_pb2_grpc
from everystop_lab.bench.common import report
from everystop_lab.own_services import OwnServices, own_services
from everystop_lab.settling import settled
from everystop_lab.usage import Usage, usage_of

_MAX_EVENTS_BEFORE_CANCEL = 6
_LONG = 1000
"""Tokens of an answer that is always cancelled before its end."""
_VOCAB_SIZE = 256
_PATIENCE_S = 60.0


@dataclass(slots=True)
class Tally:
    """How requests ended."""

    finished: int = 0
    cancelled: int = 0
    output_tokens: int = 0


@click.command
@click.option("--requests", "num_requests", type=click.IntRange(10), default=50_000, show_default=True)
@click.option("--streams", "num_streams", type=click.IntRange(1, 4096), default=64, show_default=True)
@click.option("--cancelled", "cancel_share", type=click.FloatRange(0, 1), default=0.2, show_default=True, help="Share.")
@click.option("--warm-up", "warm_up_share", type=click.FloatRange(0, 1), default=0.2, show_default=True, help="Share.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--max-growth",
    type=click.FloatRange(1),
    default=1.1,
    show_default=True,
    help="How much larger a process may be in the end than after the warm-up.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def soak(
    context: click.Context,
    /,
    num_requests: int,
    num_streams: int,
    cancel_share: float,
    warm_up_share: float,
    seed: int,
    max_growth: float,
    *,
    as_json: bool,
) -> None:
    """Send many requests through a scheduler and a mock executor, and look at what both processes hold.

    Exits with 1 when a block, request, stream or file descriptor is left, or the memory has grown.
    """
    log.configure("auto", "error")
    load = Load(random.Random(seed), num_streams, cancel_share)
    figures = asyncio.run(_soak(load, num_requests, round(warm_up_share * num_requests)))
    report(figures, as_json=as_json)
    context.exit(0 if is_clean(figures, max_growth) else 1)


def is_clean(figures: Mapping[str, float], max_growth: float) -> bool:
    """Whether nothing is left, no process has grown by more than `max_growth`, and the scheduler ended well."""
    num_left = sum(value for name, value in figures.items() if name.startswith("left_"))
    growth = max(value for name, value in figures.items() if name.endswith("_growth"))
    return num_left == 0 and growth <= max_growth and figures["exit_status"] == 0


async def _soak(load: Load, num_requests: int, num_warm_up: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="everystop-soak-") as folder, tempfile.TemporaryFile() as output:
        flags = ["--log-level=warning"]
        executor_flags = [*flags, "--backend=mock", "--mock-step-ms=0", "--mock-eos-rate=0.01"]
        async with own_services(executor_flags, flags, folder=Path(folder), log=output) as services:
            async with AsyncClient(services.address) as client:
                await settled(client, _PATIENCE_S)
                await load.send(client, num_warm_up)
                await settled(client, _PATIENCE_S)
                before = _usages(services)
                started = time.monotonic()
                await load.send(client, num_requests - num_warm_up)
                seconds = time.monotonic() - started
                status = await settled(client, _PATIENCE_S)
                after = _usages(services)
                num_left_streams = await _drain(services.address)
            exit_status = await services.scheduler.wait_ended()
    return _figures(load.tally, status, before, after) | {
        "left_streams": num_left_streams,
        "exit_status": exit_status,
        "requests_per_s": (num_requests - num_warm_up) / seconds,
    }


async def _drain(address: str) -> int:
    """Let the scheduler end; returns the streams that it still holds, those included that the core knows nothing of."""
    async with client_channel(address) as channel:
        stub: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(channel)
        return (await stub.Drain(admin_pb2.DrainRequest())).num_requests


def _usages(services: OwnServices) -> dict[str, Usage]:
    return {"scheduler": usage_of(services.scheduler.pid), "executor": usage_of(services.executor.pid)}


def _figures(
    tally: Tally, status: admin_pb2.GetStatusResponse, before: dict[str, Usage], after: dict[str, Usage]
) -> dict[str, float]:
    figures: dict[str, float] = {
        "requests": tally.finished + tally.cancelled,
        "finished": tally.finished,
        "cancelled": tally.cancelled,
        "output_tokens": tally.output_tokens,
        "left_requests": status.num_running + status.num_waiting,
        "left_blocks": status.blocks.num_used_blocks,
    }
    for name, then in before.items():
        now = after[name]
        figures |= {
            f"{name}_mib_after_warm_up": then.rss_mib,
            f"{name}_mib": now.rss_mib,
            f"{name}_growth": now.rss_mib / then.rss_mib,
            f"{name}_fds": now.num_fds,
            f"left_{name}_fds": max(0, now.num_fds - then.num_fds),
            f"{name}_threads": now.num_threads,
        }
    return figures


class Load:
    """Streams that share a number of requests, some of which they cancel."""

    def __init__(self, rng: random.Random, num_streams: int, cancel_share: float) -> None:
        self.tally = Tally()
        self._rng = rng
        self._num_streams = num_streams
        self._cancel_share = cancel_share

    async def send(self, client: AsyncClient, num_requests: int) -> None:
        """Return when all have ended. Raises ServiceError when one fails."""
        numbers = iter(range(num_requests))

        async def stream() -> None:
            for _ in numbers:  # shared: each stream takes the next one
                await self._request(client)

        await asyncio.gather(*[stream() for _ in range(self._num_streams)])

    async def _request(self, client: AsyncClient) -> None:
        prompt = [self._rng.randrange(_VOCAB_SIZE) for _ in range(self._rng.randint(1, 60))]
        if self._rng.random() < self._cancel_share:
            stream = client.generate(prompt, max_tokens=_LONG, ignore_eos=True)
            max_events = self._rng.randint(1, _MAX_EVENTS_BEFORE_CANCEL)
        else:
            stream = client.generate(prompt, max_tokens=self._rng.randint(2, 24))
            max_events = None
        num_events = 0
        async with aclosing(stream):
            async for event in stream:
                num_events += 1
                if isinstance(event, Delta):
                    self.tally.output_tokens += len(event.token_ids)
                elif isinstance(event, Finished):
                    self.tally.finished += 1
                if num_events == max_events:
                    self.tally.cancelled += 1
                    return
