"""Accounts for every request: counts, latencies, its canonical log line, and its trace when there is one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import structlog

from everystop.errors import Reason, ServiceError
from scheduler_svc.core import Request
from scheduler_svc.latencies import Latencies, TokenClock
from scheduler_svc.limits import MAX_REQUEST_ID_LENGTH, MAX_TENANT_LENGTH
from scheduler_svc.stream import Ending, RequestStream, timings

if TYPE_CHECKING:
    from scheduler_svc.tracing import RequestTrace, RequestTracer

COMPLETE = ("eos", "stop_token", "stop_string", "length")
"""Reasons in the log line of requests whose answer is complete."""

_REFUSALS = (
    *(Reason.INVALID_FIELD, Reason.REQUEST_TOO_LARGE, Reason.REQUEST_ID_IN_USE),
    *(Reason.QUEUE_FULL, Reason.NO_EXECUTOR, Reason.DRAINING, Reason.CANCELLED, Reason.INTERNAL),
)

log = structlog.get_logger()


class Ledger:
    """One entry for each request, from its first look at the door on. `clock` gives the time in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_submitted = 0
        self.outcomes: Counter[str] = Counter()
        """Ended requests by the reason in their log line."""
        self.refusals: Counter[str] = Counter(dict.fromkeys(_REFUSALS, 0))
        """Requests that never got in, by `ErrorInfo.reason`."""
        self.latencies = Latencies()
        self.tracer: RequestTracer | None = None
        """Set when requests are traced."""
        self._clock = clock

    def begin_trace(self, request: Request, traceparent: str) -> RequestTrace | None:
        """Begin the trace of a request below its client's span; None when requests are not traced."""
        return None if self.tracer is None else self.tracer.begin(request, traceparent, time.time_ns())

    def submitted(self) -> None:
        """A request is in the queue."""
        self.num_submitted += 1

    def refused(self, request_id: str, tenant: str, error: ServiceError) -> None:
        """A request never got in. This is its canonical line; id and tenant may be the very reason, so they are cut."""
        self.refusals[error.reason] += 1
        log.info(
            "request_refused",
            request_id=request_id[:MAX_REQUEST_ID_LENGTH],
            tenant=tenant[:MAX_TENANT_LENGTH],
            reason=error.reason,
            message=error.message,
        )

    def tokens_arrived(self, clocks: Iterable[TokenClock]) -> None:
        """A step brought one token for each of `clocks`."""
        self.latencies.tokens_arrived(clocks, self._clock())

    def ended(self, stream: RequestStream, ending: Ending) -> None:
        """A request has ended. This is its canonical line."""
        now, request, stats = self._clock(), stream.request, ending.stats
        self.outcomes[ending.reason] += 1
        if ending.reason in COMPLETE:
            self.latencies.completed(request, stats, ending.num_output_tokens, now)
        if stream.trace is not None:
            stream.trace.end(ending, now)
        times = timings(stats, now)
        log.info(
            "request_finished",
            request_id=request.request_id,
            tenant=request.tenant,
            reason=ending.reason,
            **({"message": ending.message} if ending.message else {}),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_resumed_tokens=len(request.answer_token_ids),
            num_cached_tokens=stats.num_cached_tokens,
            num_output_tokens=ending.num_output_tokens,
            queued_ms=round(times.queued_ms, 2),
            first_token_ms=round(times.first_token_ms, 2),
            total_ms=round(times.total_ms, 2),
            num_attempts=stats.num_attempts,
            num_preemptions=stats.num_preemptions,
            num_recomputed_tokens=stats.num_recomputed_tokens,
            **({"trace_id": stream.trace.trace_id} if stream.trace is not None else {}),
        )
