"""The executor's spans: one for each attempt of a traced request, below the request's own.

NOTE: imported only where requests are traced, because it imports OpenTelemetry.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from opentelemetry.trace import Span, Tracer

from everystop.plan import NewSequence, StepPlan
from everystop.tracing import context_of


@dataclass(slots=True)
class _Attempt:
    span: Span
    num_tokens_left: int
    """Of those that it was admitted with, how many are still to compute."""


class AttemptTracer:
    """Belongs to the forward thread."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._attempts: dict[int, _Attempt] = {}  # by slot
        self._last_step_ns = 0

    @property
    def has_open_spans(self) -> bool:
        """Whether any attempt is on."""
        return bool(self._attempts)

    def stepped(self, plan: StepPlan, started_ns: int) -> None:
        """A plan, whose step began at `started_ns` since the Unix epoch, is done."""
        for slot in plan.exit_slots:
            self._end(slot)
        for sequence in plan.admissions:
            if sequence.traceparent:
                self._begin(sequence, plan.step_id, started_ns)
        self._last_step_ns = time.time_ns()
        for slot, num_tokens in zip(plan.chunk_slots, plan.chunk_num_tokens, strict=True):
            attempt = self._attempts.get(slot)
            if attempt is not None:
                attempt.num_tokens_left -= num_tokens
                if attempt.num_tokens_left == 0:
                    attempt.span.add_event("prefilled", timestamp=self._last_step_ns)

    def end_all(self) -> None:
        """Nobody computes any more."""
        for slot in list(self._attempts):
            self._end(slot)

    def _begin(self, sequence: NewSequence, step_id: int, started_ns: int) -> None:
        span = self._tracer.start_span(
            "execute",
            context_of(sequence.traceparent),
            start_time=started_ns,
            attributes={
                "everystop.request_id": sequence.request_id,
                "everystop.attempt": sequence.attempt,
                "everystop.num_tokens": len(sequence.token_ids),
                "everystop.step_id": step_id,
            },
        )
        self._attempts[sequence.slot] = _Attempt(span, len(sequence.token_ids) - sequence.num_computed_tokens)

    def _end(self, slot: int) -> None:
        attempt = self._attempts.pop(slot, None)
        if attempt is not None:
            attempt.span.end(self._last_step_ns)
