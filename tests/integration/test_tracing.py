"""One trace per request over client, scheduler and executor, as an OpenTelemetry collector receives it."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from everystop.client import Client, Delta
from everystop.testing import serve_mock

GENERATE = "everystop.scheduler.v1.InferenceService/Generate"
TIMEOUT_S = 20.0


class Collector(pb_grpc.TraceServiceServicer):
    """Keeps every span: service, name and span."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, object]] = []
        self._arrived = threading.Condition()

    def Export(self, request, context):  # noqa: N802  # gRPC's name
        with self._arrived:
            for resource_spans in request.resource_spans:
                service = next(
                    attribute.value.string_value
                    for attribute in resource_spans.resource.attributes
                    if attribute.key == "service.name"
                )
                for scope_spans in resource_spans.scope_spans:
                    self.spans += [(service, span.name, span) for span in scope_spans.spans]
            self._arrived.notify_all()
        return pb.ExportTraceServiceResponse()

    def wait_for(self, num_spans: int) -> dict[tuple[str, str], object]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.spans) >= num_spans, TIMEOUT_S), self.names()
            return {(service, name): span for service, name, span in self.spans}

    def names(self) -> list[tuple[str, str]]:
        return [(service, name) for service, name, _ in self.spans]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Collector, str]]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds until spans are sent
    servicer = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


def attributes(span) -> dict[str, object]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


def test_one_trace_over_client_scheduler_and_executor(collector) -> None:
    received, endpoint = collector
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("application")
    with serve_mock(otlp_endpoint=endpoint) as service, Client(service.address) as client:
        with tracer.start_as_current_span("answer a user") as parent:
            answer = client.complete("hello", max_tokens=7, ignore_eos=True, request_id="traced", tenant="t")
        # The executor's span comes although nothing else keeps the service busy.
        spans = received.wait_for(5)
    assert len(answer.token_ids) == 7
    request = spans["everystop-scheduler", GENERATE]
    execute = spans["everystop-executor", "execute"]
    children = [spans["everystop-scheduler", name] for name in ("queued", "prefill", "decode")]
    trace_id = parent.get_span_context().trace_id.to_bytes(16, "big")
    assert {span.trace_id for span in (request, execute, *children)} == {trace_id}
    assert request.parent_span_id == parent.get_span_context().span_id.to_bytes(8, "big")
    assert {span.parent_span_id for span in (execute, *children)} == {request.span_id}
    # The three follow each other without a gap, from the beginning to the end.
    times = [request.start_time_unix_nano, *(span.end_time_unix_nano for span in children)]
    assert [span.start_time_unix_nano for span in children] == times[:3]
    assert times == sorted(times)
    assert request.end_time_unix_nano == times[-1]
    assert request.start_time_unix_nano <= execute.start_time_unix_nano <= execute.end_time_unix_nano
    assert [event.name for event in execute.events] == ["prefilled"]
    known = attributes(request)
    assert (known["everystop.request_id"], known["everystop.tenant"]) == ("traced", "t")
    assert (known["gen_ai.usage.input_tokens"], known["gen_ai.usage.output_tokens"]) == (5, 7)
    assert known["everystop.num_attempts"] == 1
    assert attributes(execute)["everystop.attempt"] == 1


def test_an_attempt_on_each_executor_is_a_span(collector) -> None:
    received, endpoint = collector
    with serve_mock(otlp_endpoint=endpoint, mock_step_ms=5.0) as service, Client(service.address) as client:
        stream = client.generate("hello", max_tokens=40, ignore_eos=True)
        next(event for event in stream if isinstance(event, Delta))
        service.stop_executor()
        service.start_executor()
        assert list(stream)[-1].usage.num_output_tokens == 40
        received.wait_for(6)
    attempts = [span for service, name, span in received.spans if name == "execute"]
    assert [attributes(span)["everystop.attempt"] for span in attempts] == [1, 2]
    assert len({span.trace_id for _, _, span in received.spans}) == 1


def test_a_failed_request_is_an_error(collector) -> None:
    received, endpoint = collector
    with serve_mock(otlp_endpoint=endpoint, mock_step_ms=5.0) as service, Client(service.address) as client:
        stream = client.generate("hello", max_tokens=1000, ignore_eos=True)
        next(event for event in stream if isinstance(event, Delta))
        stream.close()
        spans = received.wait_for(5)
    request = spans["everystop-scheduler", GENERATE]
    assert request.status.message == "the call was cancelled"
    assert attributes(request)["gen_ai.response.finish_reasons"].values[0].string_value == "cancelled"


def test_what_the_client_does_not_record_nobody_records(collector) -> None:
    received, endpoint = collector
    tracer = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("application")
    with serve_mock(otlp_endpoint=endpoint) as service, Client(service.address) as client:
        with tracer.start_as_current_span("unrecorded"):
            client.complete("first", max_tokens=2)
        client.complete("second", max_tokens=2, request_id="second")
        spans = received.wait_for(5)
    assert attributes(spans["everystop-scheduler", GENERATE])["everystop.request_id"] == "second"
    assert [name for _, name in received.names()].count("execute") == 1


def test_a_collector_that_is_gone_changes_nothing() -> None:
    with serve_mock(otlp_endpoint="http://127.0.0.1:1") as service, Client(service.address) as client:
        assert len(client.complete("hello", max_tokens=3, ignore_eos=True).token_ids) == 3


CLIENT_SCRIPT = """
import asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from everystop.client import AsyncClient, Client
from everystop.errors import ServiceError
from everystop.testing import serve_mock

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)

async def asynchronously(address):
    async with AsyncClient(address) as client:
        await client.complete("hello", max_tokens=2)

with serve_mock() as service, Client(service.address) as client:
    client.complete("hello", max_tokens=2)
    asyncio.run(asynchronously(service.address))
    try:
        client.complete("hello", max_tokens=0)
    except ServiceError:
        pass
for span in exporter.get_finished_spans():
    print(span.name, span.kind.name, span.status.status_code.name)
"""


def run(script: str) -> list[str]:
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


def test_clients_make_spans_where_the_application_traces() -> None:
    assert run(CLIENT_SCRIPT) == [f"{GENERATE} CLIENT {status}" for status in ("UNSET", "UNSET", "ERROR")]


def test_nothing_is_imported_when_it_is_off() -> None:
    script = """
import sys
from everystop.client import Client
from everystop.testing import serve_mock
with serve_mock() as service, Client(service.address) as client:
    client.complete("hello", max_tokens=2)
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "prometheus_client")))
"""
    assert run(script) == [""]


def test_without_the_library_the_error_says_what_to_install() -> None:
    script = """
import sys
sys.modules["opentelemetry"] = None
from everystop.cli import main
sys.argv = ["everystop", "scheduler", "--listen=127.0.0.1:0", "--otlp-endpoint=http://127.0.0.1:1"]
main()
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert finished.returncode == 1
    assert "pip install 'everystop[tracing]'" in finished.stderr
    assert "Traceback" not in finished.stderr
