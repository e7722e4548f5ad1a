"""What a queue limit gives: the load that the service is made for against ten times that load."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
import grpc

from everystop import log
from everystop.client import AsyncClient
from everystop.errors import ServiceError
from everystop_lab.bench.common import report
from everystop_lab.own_services import OwnServices, own_services
from everystop_lab.settling import settled
from everystop_lab.usage import usage_of

_NUM_PROMPT_TOKENS = 16
_MAX_TOKENS = 32
_PATIENCE_S = 60.0
_WARM_UP_S = 2.0


@dataclass(slots=True)
class _Pass:
    """One load for a while."""

    num_streams: int
    seconds: float
    latencies_s: list[float] = field(default_factory=list)
    """Of those that were served within that time: from sending the try that was accepted to the end."""
    num_refused: int = 0

    @property
    def served_per_s(self) -> float:
        """Requests."""
        return len(self.latencies_s) / self.seconds


@click.command
@click.option("--seqs", "max_num_seqs", type=click.IntRange(1, 1024), default=16, show_default=True, help="That run.")
@click.option("--waiting", "max_waiting", type=click.IntRange(1, 1024), default=8, show_default=True, help="That wait.")
@click.option("--times", type=click.IntRange(2, 100), default=10, show_default=True, help="Load of the second pass.")
@click.option("--seconds", type=click.FloatRange(0.5), default=10.0, show_default=True, help="Of each pass.")
@click.option("--step-ms", type=click.FloatRange(0), default=5.0, show_default=True, help="Of the mock executor.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def overload(max_num_seqs: int, max_waiting: int, times: int, seconds: float, step_ms: float, *, as_json: bool) -> None:
    """As many streams as fit into seats and queue, then ten times as many; the queue limit refuses the rest."""
    log.configure("auto", "error")
    figures = asyncio.run(_measure(max_num_seqs, max_waiting, times, seconds, step_ms))
    report(figures, as_json=as_json)


async def _measure(
    max_num_seqs: int, max_waiting: int, times: int, seconds: float, step_ms: float
) -> dict[str, float | int]:
    executor_flags = ["--log-level=error", "--backend=mock", f"--mock-step-ms={step_ms}"]
    scheduler_flags = ["--log-level=error", f"--max-num-seqs={max_num_seqs}", f"--max-waiting={max_waiting}"]
    num_streams = max_num_seqs + max_waiting
    with tempfile.TemporaryDirectory(prefix="everystop-overload-") as folder, tempfile.TemporaryFile() as output:
        async with (
            own_services(executor_flags, scheduler_flags, folder=Path(folder), log=output) as services,
            AsyncClient(services.address, retry=None) as client,
        ):
            await settled(client, _PATIENCE_S)
            await _run(client, _Pass(times * num_streams, _WARM_UP_S))
            once = await _run(client, _Pass(num_streams, seconds))
            memory_once = _memory(services)
            many = await _run(client, _Pass(times * num_streams, seconds))
            memory_many = _memory(services)
    return _figures(once, many) | {
        f"{name}_{what}": value
        for name, then in memory_once.items()
        for what, value in (
            ("mib_at_one", then),
            ("mib_at_many", memory_many[name]),
            ("growth", memory_many[name] / then),
        )
    }


def _memory(services: OwnServices) -> dict[str, float]:
    return {
        "scheduler": usage_of(services.scheduler.pid).rss_mib,
        "executor": usage_of(services.executor.pid).rss_mib,
    }


def _figures(once: _Pass, many: _Pass) -> dict[str, float | int]:
    p50_once, p50_many = statistics.median(once.latencies_s), statistics.median(many.latencies_s)
    return {
        "streams_at_one": once.num_streams,
        "streams_at_many": many.num_streams,
        "refused_at_one": once.num_refused,
        "refused_at_many": many.num_refused,
        "served_per_s_at_one": once.served_per_s,
        "served_per_s_at_many": many.served_per_s,
        "served_ratio": many.served_per_s / once.served_per_s,
        "latency_p50_ms_at_one": 1000 * p50_once,
        "latency_p50_ms_at_many": 1000 * p50_many,
        "latency_ratio": p50_many / p50_once,
    }


async def _run(client: AsyncClient, load: _Pass) -> _Pass:
    end = time.monotonic() + load.seconds
    await asyncio.gather(*[_stream(client, load, random.Random(index), end) for index in range(load.num_streams)])
    return load


async def _stream(client: AsyncClient, load: _Pass, rng: random.Random, end: float) -> None:
    """One request after another until `end`; a refused one is tried again when its refusal says so."""
    while (sent := time.monotonic()) < end:
        prompt = [rng.randrange(256) for _ in range(_NUM_PROMPT_TOKENS)]
        try:
            await client.complete(prompt, max_tokens=_MAX_TOKENS, ignore_eos=True, temperature=0.0)
        except ServiceError as error:
            if error.code is not grpc.StatusCode.RESOURCE_EXHAUSTED or error.retry_after_s is None:
                raise
            load.num_refused += 1
            # Those that were refused together do not come back together.
            await asyncio.sleep(error.retry_after_s * rng.uniform(0.5, 1.5))
        else:
            now = time.monotonic()
            if now < end:
                load.latencies_s.append(now - sent)
