"""The bare forward loop: a backend and the simplest batching that fills it, in one process, nothing around it.

It is what `everystop bench split` holds the whole service against: the same backend, the same requests, the same limits of
a step, and no scheduler, no gRPC, no text and no clients.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import click

from everystop.plan import SamplingParams
from executor_svc.backend import Backend, ScheduledSequence, Seat, StepBatch
from everystop_lab.workload import WorkItem


class BareLoop:
    """Keeps `num_streams` sequences running until a request set is done.

    Every stream owns a fixed range of blocks. A step decodes all that decode and fills what is left of the budget with
    prompts, at most `max_prefill_chunk` tokens of each.
    """

    def __init__(
        self, backend: Backend, *, num_streams: int, max_num_batched_tokens: int, max_prefill_chunk: int
    ) -> None:
        self._backend = backend
        self._num_streams = num_streams
        self._budget = max_num_batched_tokens
        self._max_chunk = max_prefill_chunk
        self._step_id = 0

    def run(self, items: Sequence[WorkItem]) -> tuple[int, float]:
        """Output tokens, and the seconds that they took. Raises ValueError when the KV cache is too small for all streams."""
        waiting = list(reversed(items))
        running: dict[int, tuple[Seat, WorkItem]] = {}
        exited: list[Seat] = []
        num_tokens = 0
        started = time.perf_counter()
        while waiting or running:
            free_slots = [slot for slot in range(self._num_streams) if slot not in running]
            admitted = []
            for slot in free_slots[: len(waiting)]:
                item = waiting.pop()
                running[slot] = (self._seat(slot, item), item)
                admitted.append(running[slot][0])
            batch = self._batch(running, exited, admitted)
            token_ids = iter(self._backend.execute(batch).token_ids)
            exited = []
            for scheduled in batch.scheduled:
                seat = scheduled.seat
                seat.num_computed_tokens += scheduled.num_tokens
                if scheduled.samples:
                    seat.token_ids.append(next(token_ids))
                    num_tokens += 1
                    if len(seat.token_ids) == seat.num_prompt_tokens + running[seat.slot][1].max_tokens:
                        exited.append(seat)
                        del running[seat.slot]
        seconds = time.perf_counter() - started
        self._backend.reset()
        return num_tokens, seconds

    def _seat(self, slot: int, item: WorkItem) -> Seat:
        info = self._backend.info
        blocks_per_stream = info.num_blocks // self._num_streams
        num_blocks = -(-(len(item.prompt_token_ids) + item.max_tokens) // info.block_size)
        if num_blocks > blocks_per_stream:
            raise ValueError(
                f"a request needs {num_blocks} KV blocks, each of {self._num_streams} streams has {blocks_per_stream}"
            )
        first = slot * blocks_per_stream
        return Seat(
            slot=slot,
            request_id=str(slot),
            attempt=1,
            token_ids=list(item.prompt_token_ids),
            num_prompt_tokens=len(item.prompt_token_ids),
            num_computed_tokens=0,
            block_ids=list(range(first, first + num_blocks)),
            sampling=SamplingParams(temperature=0.0),
        )

    def _batch(self, running: dict[int, tuple[Seat, WorkItem]], exited: list[Seat], admitted: list[Seat]) -> StepBatch:
        self._step_id += 1
        seats = [running[slot][0] for slot in sorted(running)]
        missing = {seat.slot: len(seat.token_ids) - seat.num_computed_tokens for seat in seats}
        budget = self._budget - sum(1 for num_tokens in missing.values() if num_tokens == 1)
        scheduled = []
        for seat in seats:
            num_tokens = missing[seat.slot]
            if num_tokens > 1:
                num_tokens = min(num_tokens, self._max_chunk, budget)
                budget -= num_tokens
            if num_tokens:
                scheduled.append(ScheduledSequence(seat, num_tokens, samples=num_tokens == missing[seat.slot]))
        return StepBatch(self._step_id, exited, admitted, scheduled)
