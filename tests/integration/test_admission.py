"""What stands between a call and the queue: limits that cost little to enforce, and a line for whoever stays out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from moody_executor import MoodyExecutor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from services import TIMEOUT_S, Scheduling, scheduling

from everystop.client import AsyncClient, Delta
from everystop.errors import Reason, ServiceError
from everystop.scheduler.v1 import inference_pb2 as pb
from everystop.scheduler.v1 import inference_pb2_grpc
from scheduler_svc import server, text_work
from scheduler_svc.tracing import RequestTracer

LONG_TEXT = "x" * text_work.LONG_TEXT
MANY = 50_000


@asynccontextmanager
async def connected(**settings: Any) -> AsyncIterator[Scheduling]:
    async with (
        asyncio.timeout(TIMEOUT_S),
        MoodyExecutor(mock_step_ms=2.0) as executor,
        scheduling(executor.address, **settings) as scheduler,
    ):
        await scheduler.until("connected")
        yield scheduler


async def refusal(call: Any) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await call
    return caught.value


async def running(client: AsyncClient) -> AsyncIterator[Any]:
    stream = client.generate([65], max_tokens=MANY)
    while not isinstance(await anext(stream), Delta):
        pass
    return stream


class SlowTokenizer:
    """Encodes nothing until it may."""

    def __init__(self, scheduler: Scheduling, monkeypatch: pytest.MonkeyPatch) -> None:
        assert scheduler.loop.model is not None
        self.num_threads = 0
        self._may = threading.Event()
        self._encode = scheduler.loop.model.tokenizer.encode
        monkeypatch.setattr(scheduler.loop.model.tokenizer, "encode", self.encode)

    def encode(self, text: str) -> list[int]:
        self.num_threads += 1
        assert self._may.wait(TIMEOUT_S)
        return self._encode(text)

    def go_on(self) -> None:
        self._may.set()

    async def until_busy(self, num_threads: int) -> None:
        while self.num_threads < num_threads:
            await asyncio.sleep(0.001)


async def test_a_full_queue_refuses_before_it_looks_at_the_request() -> None:
    async with connected(max_waiting=1, max_num_seqs=1) as scheduler:
        first = await running(scheduler.client)
        second = scheduler.client.generate([66], max_tokens=1)
        await anext(second)
        error = await refusal(scheduler.client.complete("never looked at", max_tokens=0))
        assert (error.reason, error.message) == (Reason.QUEUE_FULL, "1 requests are waiting, at most 1 may")
        await second.aclose()
        await first.aclose()


async def test_no_more_requests_are_checked_at_once_than_could_ever_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(max_waiting=1, max_num_seqs=1) as scheduler:
        tokenizer = SlowTokenizer(scheduler, monkeypatch)
        calls = [asyncio.create_task(scheduler.client.complete(LONG_TEXT, max_tokens=1)) for _ in range(2)]
        await tokenizer.until_busy(2)
        error = await refusal(scheduler.client.complete("x", max_tokens=1))
        assert (error.reason, error.message) == (Reason.QUEUE_FULL, "2 requests are being checked, at most 2 may")
        assert error.retry_after_s is not None
        tokenizer.go_on()
        await asyncio.wait(calls)
        assert len((await scheduler.client.complete("x", max_tokens=1)).token_ids) == 1


async def test_texts_wait_for_two_threads_and_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_work, "MAX_PENDING_LENGTH", 4 * len(LONG_TEXT))
    async with connected() as scheduler:
        tokenizer = SlowTokenizer(scheduler, monkeypatch)
        calls = [asyncio.create_task(scheduler.client.complete(LONG_TEXT, max_tokens=1)) for _ in range(4)]
        while text_work.TEXT_WORK.pending_length < 4 * len(LONG_TEXT):
            await asyncio.sleep(0.001)
        error = await refusal(scheduler.client.complete(LONG_TEXT, max_tokens=1))
        assert error.reason is Reason.QUEUE_FULL
        assert error.message == "texts of 8192 characters are being read, at most 8192 may"
        assert tokenizer.num_threads == 2
        tokenizer.go_on()
        assert [len(answer.token_ids) for answer in await asyncio.gather(*calls)] == [1] * 4
        assert text_work.TEXT_WORK.pending_length == 0


async def test_answers_that_nobody_reads_count() -> None:
    async with connected(max_waiting=1, max_num_seqs=1) as scheduler:
        small_window = (("grpc.http2.bdp_probe", 0),)
        async with grpc.aio.insecure_channel(scheduler.client.address, options=small_window) as channel:
            calls = []
            for num_ended in (1, 2):
                request = pb.GenerateRequest(
                    token_ids=pb.TokenIds(ids=[65] * 2000),
                    stop=pb.StopConditions(max_tokens=1),
                    output=pb.OutputOptions(prompt_logprobs=20),
                )
                calls.append(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request))
                await calls[-1].read()
                while scheduler.loop.desk.ledger.outcomes["length"] < num_ended:
                    await asyncio.sleep(0.01)
            error = await refusal(scheduler.client.complete("x", max_tokens=1))
            assert error.reason is Reason.QUEUE_FULL
            assert error.message == "2 requests have an answer that their clients have not read, at most 2 may"
            for call in calls:
                call.cancel()
            while scheduler.loop.desk.num_unread:
                await asyncio.sleep(0.01)


async def test_the_server_takes_only_so_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as scheduler:
        limit = server._max_calls(scheduler.loop.config)
        assert limit > 2 * (scheduler.loop.config.max_waiting + scheduler.loop.config.max_num_seqs)
    monkeypatch.setattr(server, "_max_calls", lambda _config: 1)
    async with connected() as scheduler:
        stream = await running(scheduler.client)
        error = await refusal(scheduler.client.get_model())
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.TRANSPORT)
        await stream.aclose()


async def test_a_request_that_is_cancelled_while_it_is_checked_leaves_one_line(
    lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected() as scheduler:
        tokenizer = SlowTokenizer(scheduler, monkeypatch)
        call = asyncio.create_task(scheduler.client.complete(LONG_TEXT, max_tokens=1, request_id="early"))
        await tokenizer.until_busy(1)
        call.cancel()
        while not scheduler.loop.desk.ledger.refusals[Reason.CANCELLED]:
            await asyncio.sleep(0.001)
        tokenizer.go_on()
    (line,) = [line for line in lines if line["event"].startswith("request_")]
    assert (line["event"], line["request_id"], line["reason"]) == ("request_refused", "early", "CANCELLED")


async def test_a_bug_in_a_check_leaves_one_line(lines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as scheduler:
        assert scheduler.loop.model is not None
        monkeypatch.setattr(scheduler.loop.model.tokenizer, "encode", None)
        error = await refusal(scheduler.client.complete("x", max_tokens=1, request_id="unlucky"))
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, Reason.INTERNAL)
    (line,) = [line for line in lines if line["event"].startswith("request_")]
    assert (line["event"], line["request_id"], line["reason"]) == ("request_refused", "unlucky", "INTERNAL")


async def test_the_span_of_a_request_that_the_queue_refuses_ends() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with connected(max_waiting_tokens=10, max_num_seqs=1) as scheduler:
        scheduler.loop.desk.ledger.tracer = RequestTracer(provider.get_tracer("test"))
        first = await running(scheduler.client)
        second = scheduler.client.generate([66] * 8, max_tokens=1)
        await anext(second)
        await refusal(scheduler.client.complete([67] * 8, max_tokens=1, request_id="refused"))
        (span,) = exporter.get_finished_spans()
        assert span.attributes is not None
        assert span.attributes["everystop.request_id"] == "refused"
        assert span.status.status_code is StatusCode.ERROR
        await second.aclose()
        await first.aclose()
