"""The bare forward loop: a backend and the simplest batching that fills it, in one process, nothing around it.

It is what `everystop bench split` holds the whole service against: the same backend, the same requests, the same limits
of a step, and no scheduler, no gRPC, no text and no clients.

`python -m everystop_lab.bare EXECUTOR_FLAGS…` loads the backend and then runs one `Order` after another: JSON lines on
stdin, answered by JSON lines on stdout.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

from everystop import log
from everystop.config import config_command
from everystop.plan import SamplingParams
from everystop.settings import ExecutorConfig
from everystop_lab.workload import WorkItem
from executor_svc.__main__ import load_backend
from executor_svc.backend import Backend, ScheduledSequence, Seat, StepBatch, StepOutput


@dataclass(frozen=True, slots=True)
class Order:
    """A request set to run, and how."""

    items: list[WorkItem]
    num_streams: int
    max_num_batched_tokens: int
    max_prefill_chunk: int

    def to_json(self) -> str:
        """On one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Order:
        """What `to_json` wrote."""
        fields = json.loads(line)
        return cls(**(fields | {"items": [WorkItem(**item) for item in fields["items"]]}))


class BareLoop:
    """Keeps an order's number of sequences running until its request set is done.

    Every stream owns a fixed range of blocks. A step decodes all that decode and fills what is left of the budget with
    prompts, at most `max_prefill_chunk` tokens of each.
    """

    def __init__(self, backend: Backend, order: Order) -> None:
        self._backend = backend
        self._order = order
        self._waiting = list(reversed(order.items))
        self._running: dict[int, tuple[Seat, WorkItem]] = {}
        self._exited: list[Seat] = []
        self._step_id = 0

    def run(self) -> int:
        """Run the request set to its end; returns the number of output tokens.

        Raises ValueError when the KV cache is too small for all streams.
        """
        num_output_tokens = 0
        while self._waiting or self._running:
            batch = self._batch()
            output = self._backend.execute(batch)
            self._apply(batch, output)
            num_output_tokens += len(output.token_ids)
        self._backend.reset()
        return num_output_tokens

    def _batch(self) -> StepBatch:
        admitted = self._admit()
        seats = [self._running[slot][0] for slot in sorted(self._running)]
        num_missing = [len(seat.token_ids) - seat.num_computed_tokens for seat in seats]
        budget = self._order.max_num_batched_tokens - num_missing.count(1)
        scheduled = []
        for seat, missing in zip(seats, num_missing, strict=True):
            num_tokens = missing
            if missing > 1:
                num_tokens = min(missing, self._order.max_prefill_chunk, budget)
                budget -= num_tokens
            if num_tokens:
                scheduled.append(ScheduledSequence(seat, num_tokens, samples=num_tokens == missing))
        self._step_id += 1
        exited, self._exited = self._exited, []
        return StepBatch(self._step_id, exited, admitted, scheduled)

    def _admit(self) -> list[Seat]:
        admitted = []
        for slot in range(self._order.num_streams):
            if slot not in self._running and self._waiting:
                item = self._waiting.pop()
                self._running[slot] = self._seat(slot, item), item
                admitted.append(self._running[slot][0])
        return admitted

    def _apply(self, batch: StepBatch, output: StepOutput) -> None:
        token_ids = iter(output.token_ids)
        for scheduled in batch.scheduled:
            seat = scheduled.seat
            seat.num_computed_tokens += scheduled.num_tokens
            if scheduled.samples:
                seat.token_ids.append(next(token_ids))
                if len(seat.token_ids) == seat.num_prompt_tokens + self._running[seat.slot][1].max_tokens:
                    self._exited.append(seat)
                    del self._running[seat.slot]

    def _seat(self, slot: int, item: WorkItem) -> Seat:
        info = self._backend.info
        blocks_per_stream = info.num_blocks // self._order.num_streams
        num_blocks = -(-(len(item.prompt_token_ids) + item.max_tokens) // info.block_size)
        if num_blocks > blocks_per_stream:
            raise ValueError(f"a request needs {num_blocks} KV blocks, a stream has {blocks_per_stream}")
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


@config_command("executor", ExecutorConfig, help="Run request sets from stdin through a bare forward loop.")
def main(config: ExecutorConfig) -> None:
    """Answer each order with its output tokens and the seconds that they took."""
    log.configure(config.log_format, config.log_level)
    backend = load_backend(config)
    for line in sys.stdin:
        bare = BareLoop(backend, Order.from_json(line))
        started = time.perf_counter()
        num_output_tokens = bare.run()
        seconds = time.perf_counter() - started
        sys.stdout.write(json.dumps({"num_output_tokens": num_output_tokens, "seconds": seconds}) + "\n")
        sys.stdout.flush()
    backend.close()


if __name__ == "__main__":
    main()
