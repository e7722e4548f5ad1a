"""OpenTelemetry traces, for those who configure them: one trace per request over client, scheduler and executor.

    client      Generate ──────────────────────────────────────────────
    scheduler     Generate ──────────────────────────────────────────
                    queued ───  prefill ────  decode ────────────────
    executor                    execute ─────────────────────────────   one for each attempt

A context travels as W3C `traceparent`: in the metadata of the call, then in the plan that seats the sequence.

NOTE: nothing here imports OpenTelemetry before somebody uses it, so that whoever doesn't trace pays nothing.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

from everystop.options import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

TRACEPARENT = "traceparent"

GENERATE = "everystop.scheduler.v1.InferenceService/Generate"
"""Name of the client's and of the scheduler's span, as OpenTelemetry names spans of calls."""

_EXPORT_TIMEOUT_S = 5
_STOP_TIMEOUT_S = 2.0
"""How long a stop may take to send the last spans; a collector that doesn't answer must not hold it up."""


class Tracing:
    """Where the spans of one service go."""

    def __init__(self, service_name: str, endpoint: str) -> None:
        """Send spans by OTLP over gRPC to `endpoint`, such as "http://127.0.0.1:4317".

        Everything else is read from OpenTelemetry's own environment variables (OTEL_TRACES_SAMPLER, OTEL_BSP_…, …).

        Raises:
            ConfigError: OpenTelemetry is not installed.

        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            message = f"--otlp-endpoint: {error.name!r} is not installed; try: pip install 'everystop[tracing]'"
            raise ConfigError(message) from error
        self._provider: TracerProvider = TracerProvider(
            resource=Resource.create({"service.name": service_name}), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer: Tracer = self._provider.get_tracer(service_name)

    async def stop(self) -> None:
        """Send what is left, as far as that takes no time."""
        # A daemon: what can't be sent is given up with the process.
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _STOP_TIMEOUT_S)


def context_of(traceparent: str) -> Context:
    """The context that `traceparent` names; an empty one for text that names none."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({TRACEPARENT: traceparent})


def traceparent_of(span: Span) -> str:
    """How others refer to `span`; empty when it is not recorded, so that they don't record theirs either."""
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    if span.is_recording():
        TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    return carrier.get(TRACEPARENT, "")


class ClientSpan:
    """A client's span around one call of Generate, with the application's own tracer, below its current span.

    Does nothing in an application that has not imported OpenTelemetry.
    """

    def __init__(self) -> None:
        self.metadata: tuple[tuple[str, str], ...] = ()
        """What the call has to carry."""
        self._span: Span | None = None

    def __enter__(self) -> Self:
        if "opentelemetry.trace" in sys.modules:
            self._begin()
        return self

    def _begin(self) -> None:
        from opentelemetry import propagate, trace

        # Never made the current one: code between two events of the stream is the application's.
        self._span = trace.get_tracer("everystop.client").start_span(GENERATE, kind=trace.SpanKind.CLIENT)
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        self.metadata = tuple(carrier.items())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._span is None:
            return
        if isinstance(error, Exception):
            from opentelemetry.trace import StatusCode

            self._span.record_exception(error)
            self._span.set_status(StatusCode.ERROR, str(error))
        self._span.end()
