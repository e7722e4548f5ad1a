"""The scheduler's spans: one for each request, with what it went through below it.

NOTE: imported only where requests are traced, because it imports OpenTelemetry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, format_trace_id, set_span_in_context

from everystop.tracing import GENERATE, context_of, traceparent_of
from scheduler_svc.core import Request

if TYPE_CHECKING:
    from scheduler_svc.stream import Ending


@dataclass(frozen=True, slots=True)
class RequestTracer:
    """Begins spans."""

    tracer: Tracer

    def begin(self, request: Request, traceparent: str, now_ns: int) -> RequestTrace:
        """A request has arrived, from the client's span that `traceparent` names. `now_ns`: since the Unix epoch."""
        span = self.tracer.start_span(
            GENERATE,
            context_of(traceparent),
            SpanKind.SERVER,
            start_time=now_ns,
            attributes={
                "everystop.request_id": request.request_id,
                "everystop.tenant": request.tenant,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            },
        )
        return RequestTrace(self.tracer, span, now_ns)


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The span of one request that has not ended."""

    tracer: Tracer
    span: Span
    arrival_ns: int

    @property
    def traceparent(self) -> str:
        """What executors refer to; empty when this trace is not recorded."""
        return traceparent_of(self.span)

    @property
    def trace_id(self) -> str:
        """As log lines and dashboards write it."""
        return format_trace_id(self.span.get_span_context().trace_id)

    def refuse(self, message: str) -> None:
        """The request was not let in: end the span."""
        self.span.set_status(StatusCode.ERROR, message)
        self.span.end()

    def end(self, ending: Ending, now: float) -> None:
        """The request has ended at `now`, on the clock of its stats: add what it went through, and end the span."""
        stats = ending.stats

        def to_ns(time_s: float) -> int:
            return self.arrival_ns + int((time_s - stats.arrival_time) * 1e9)

        times = [stats.arrival_time, stats.first_scheduled_time, stats.first_token_time, now]
        context = set_span_in_context(self.span)
        for name, start, after in zip(("queued", "prefill", "decode"), times[:-1], times[1:], strict=True):
            if start is not None:
                end = now if after is None else after
                self.tracer.start_span(name, context, start_time=to_ns(start)).end(to_ns(end))
        self.span.set_attributes(
            {
                "gen_ai.usage.output_tokens": ending.num_output_tokens,
                "gen_ai.response.finish_reasons": [ending.reason],
                "everystop.num_attempts": stats.num_attempts,
                "everystop.num_preemptions": stats.num_preemptions,
                "everystop.num_recomputed_tokens": stats.num_recomputed_tokens,
            }
        )
        if ending.message:
            self.span.set_status(StatusCode.ERROR, ending.message)
        self.span.end(to_ns(now))
