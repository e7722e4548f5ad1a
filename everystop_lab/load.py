"""Closed-loop load: so many streams, each sending its next request when the last one has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from everystop.client import AsyncClient, Delta, Finished
from everystop_lab.workload import WorkItem


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """What the client saw of one request. Times in seconds of one monotonic clock."""

    sent_time: float
    token_times: list[float]
    """Arrival of each token; tokens of one delta share theirs."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One pass over a request set."""

    seconds: float
    traces: list[RequestTrace]

    @property
    def num_output_tokens(self) -> int:
        """Tokens that arrived."""
        return sum(len(trace.token_times) for trace in self.traces)

    @property
    def output_tokens_per_s(self) -> float:
        """Over the whole pass, its ramps included."""
        return self.num_output_tokens / self.seconds


async def closed_loop(client: AsyncClient, items: Sequence[WorkItem], num_streams: int) -> LoadRun:
    """Send all of `items`, in order, over `num_streams` concurrent streams.

    Raises:
        RuntimeError: an answer doesn't have exactly the length that was asked for.

    """
    remaining = iter(items)
    traces: list[RequestTrace] = []

    async def stream() -> None:
        for item in remaining:  # shared: each stream takes the next one that nobody has taken
            traces.append(await _request(client, item))  # noqa: PERF401  # other streams append in between

    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(num_streams):
            tasks.create_task(stream())
    return LoadRun(time.perf_counter() - started, traces)


async def _request(client: AsyncClient, item: WorkItem) -> RequestTrace:
    trace = RequestTrace(time.perf_counter(), [])
    async for event in client.generate(
        item.prompt_token_ids, max_tokens=item.max_tokens, ignore_eos=True, temperature=0.0
    ):
        match event:
            case Delta():
                trace.token_times.extend([time.perf_counter()] * len(event.token_ids))
            case Finished() if len(trace.token_times) != item.max_tokens:
                raise RuntimeError(f"asked for {item.max_tokens} tokens, got {len(trace.token_times)}")
    return trace
