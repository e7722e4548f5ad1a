"""Both clients against a small scheduler that plays fixed streams."""
# ruff: noqa: N802  # methods of a servicer are named as in the protocol

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent import futures
from typing import Any, Protocol

import grpc
import pytest
from grpc_status import rpc_status

from everystop import client as clients
from everystop.client import Accepted, AsyncClient, Client, Completion, Delta, Event, Finished, FinishReason
from everystop.errors import Reason, ServiceError
from everystop.scheduler.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from everystop.scheduler.v1 import inference_pb2 as pb

SECONDS = 10.0
"""Longer than anything here takes; a test that reaches it has failed."""


class PlayedScheduler(inference_pb2_grpc.InferenceServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Answers by what the prompt says; remembers the requests."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        if request.text == "hang":
            context.add_callback(self.cancelled.set)
        if request.text == "refuse":
            error = ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL, "the queue is full", retry_after_s=1.5
            )
            context.abort_with_status(rpc_status.to_status(error.to_status()))
        yield pb.GenerateResponse(accepted=pb.Accepted(request_id="r1", num_prompt_tokens=3, seed=2**63 + 1))
        yield pb.GenerateResponse()  # an event of a kind that these clients do not know
        if request.text == "end early":
            return
        yield pb.GenerateResponse(delta=pb.Delta(token_ids=[5], logprobs=[pb.TokenLogprobs(token_id=5, logprob=-0.5)]))
        if request.text == "hang":
            self.cancelled.wait(SECONDS)
            return
        top = [pb.TopLogprob(token_id=6, logprob=-0.25, token_bytes=b"\xc3")]
        logprobs = [pb.TokenLogprobs(token_id=6, logprob=-0.25, token_bytes=b"\xc3", top=top)]
        yield pb.GenerateResponse(delta=pb.Delta(token_ids=[6], text="é", logprobs=logprobs))
        yield pb.GenerateResponse(
            finished=pb.Finished(
                reason=pb.FINISH_REASON_STOP,
                stop_token_id=6,
                usage=pb.Usage(num_prompt_tokens=3, num_cached_tokens=1, num_output_tokens=2),
                timings=pb.Timings(queued_ms=1, first_token_ms=2, total_ms=3, num_preemptions=4),
            )
        )

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        if request.text == "hang":
            context.add_callback(self.cancelled.set)
            self.cancelled.wait(SECONDS)
        encoded = request.text.encode()
        return pb.TokenizeResponse(token_ids=encoded, token_bytes=[bytes([byte]) for byte in encoded])

    def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(name="played")

    def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Any) -> admin_pb2.GetStatusResponse:
        return admin_pb2.GetStatusResponse(num_running=7)


@pytest.fixture
def scheduler() -> PlayedScheduler:
    return PlayedScheduler()


@pytest.fixture
def address(scheduler: PlayedScheduler) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(scheduler, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait()


class Kind(Protocol):
    """How a test drives either client."""

    async def call(self, address: str, method: str, *args: Any, **options: Any) -> Any: ...

    async def take(
        self, address: str, prompt: str, *, num_events: int | None = None, before_close: Callable[[], object] = list
    ) -> list[Event]:
        """Read that many events (None: all), leave the stream, call `before_close`, close the connection."""
        ...


class Asynchronous:
    async def call(self, address: str, method: str, *args: Any, **options: Any) -> Any:
        async with AsyncClient(address, retry=None) as client:
            call: Callable[..., Awaitable[Any]] = getattr(client, method)
            return await call(*args, **options)

    async def take(
        self, address: str, prompt: str, *, num_events: int | None = None, before_close: Callable[[], object] = list
    ) -> list[Event]:
        events: list[Event] = []
        async with AsyncClient(address) as client:
            async for event in client.generate(prompt):
                events.append(event)
                if len(events) == num_events:
                    break
            await asyncio.to_thread(before_close)
        return events


class Synchronous:
    async def call(self, address: str, method: str, *args: Any, **options: Any) -> Any:
        with Client(address, retry=None) as client:
            return await asyncio.to_thread(getattr(client, method), *args, **options)

    async def take(
        self, address: str, prompt: str, *, num_events: int | None = None, before_close: Callable[[], object] = list
    ) -> list[Event]:
        return await asyncio.to_thread(self._take, address, prompt, num_events, before_close)

    def _take(
        self, address: str, prompt: str, num_events: int | None, before_close: Callable[[], object]
    ) -> list[Event]:
        events: list[Event] = []
        with Client(address) as client:
            for event in client.generate(prompt):
                events.append(event)
                if len(events) == num_events:
                    break
            before_close()
        return events


@pytest.fixture(params=[Asynchronous, Synchronous])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param()
    return chosen


USAGE = clients.Usage(num_prompt_tokens=3, num_cached_tokens=1, num_output_tokens=2)
TIMINGS = clients.Timings(queued_ms=1, first_token_ms=2, total_ms=3, num_preemptions=4)
LOGPROBS = (
    clients.TokenLogprobs(5, -0.5, b""),
    clients.TokenLogprobs(6, -0.25, b"\xc3", (clients.TopLogprob(6, -0.25, b"\xc3"),)),
)


async def test_streams_events(kind: Kind, address: str) -> None:
    assert await kind.take(address, "go") == [
        Accepted("r1", num_prompt_tokens=3, num_cached_tokens=0, seed=2**63 + 1),
        Delta((5,), "", LOGPROBS[:1]),
        Delta((6,), "é", LOGPROBS[1:]),
        Finished(FinishReason.STOP, 6, USAGE, TIMINGS),
    ]


async def test_completes(kind: Kind, address: str, scheduler: PlayedScheduler) -> None:
    completion = await kind.call(address, "complete", "go", seed=0, timeout=SECONDS)
    assert completion == Completion("r1", "é", (5, 6), FinishReason.STOP, 6, 2**63 + 1, USAGE, TIMINGS, LOGPROBS)
    assert scheduler.requests == [pb.GenerateRequest(text="go", sampling=pb.SamplingParams(seed=0))]


async def test_raises_typed_errors(kind: Kind, address: str) -> None:
    with pytest.raises(ServiceError) as caught:
        await kind.call(address, "complete", "refuse")
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL)
    assert (error.message, error.retry_after_s) == ("the queue is full", 1.5)


async def test_leaving_the_iteration_cancels_the_request(kind: Kind, address: str, scheduler: PlayedScheduler) -> None:
    cancelled = []
    events = await kind.take(
        address, "hang", num_events=2, before_close=lambda: cancelled.append(scheduler.cancelled.wait(SECONDS))
    )
    assert [type(event) for event in events] == [Accepted, Delta]
    assert cancelled == [True]


@pytest.mark.parametrize("retry", [None, clients.Retry()])
async def test_closing_the_client_is_an_error_of_its_calls_and_cancels_no_task(
    address: str, retry: clients.Retry | None
) -> None:
    client = AsyncClient(address, retry=retry)
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in client.generate("hang"):
            begun.set()

    streaming = asyncio.create_task(read())
    completing = asyncio.create_task(client.complete("hang"))
    asking = asyncio.create_task(client.tokenize("hang"))
    await begun.wait()
    await client.close()
    for task in (streaming, completing, asking):
        with pytest.raises(ServiceError) as caught:
            await asyncio.wait_for(task, SECONDS)
        assert caught.value.code is grpc.StatusCode.CANCELLED


async def test_a_task_that_is_cancelled_while_its_client_is_closed_stays_cancelled(address: str) -> None:
    client = AsyncClient(address)
    completing = asyncio.create_task(client.complete("hang"))
    await asyncio.sleep(0)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    completing.cancel()
    await asyncio.wait({completing, closing})
    assert completing.cancelled()


async def test_a_closed_client_takes_no_calls(address: str) -> None:
    client, sync_client = AsyncClient(address), Client(address)
    await client.close()
    sync_client.close()
    for call in (client.complete("go"), client.get_model(), client.drain()):
        with pytest.raises(ServiceError, match="the client was closed"):
            await call
    for method in (lambda: sync_client.complete("go"), sync_client.get_model, sync_client.drain):
        with pytest.raises(ServiceError, match="the client was closed"):
            method()


async def test_cancelling_the_task_cancels_the_request(address: str, scheduler: PlayedScheduler) -> None:
    async with AsyncClient(address) as client:
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate("hang"):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(scheduler.cancelled.wait, SECONDS)


async def test_a_missed_deadline_is_a_typed_error(kind: Kind, address: str) -> None:
    with pytest.raises(ServiceError) as caught:
        await kind.call(address, "complete", "hang", timeout=0.2)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_nobody_there_is_a_typed_error(kind: Kind) -> None:
    with pytest.raises(ServiceError) as caught:
        await kind.call("127.0.0.1:1", "get_model")
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_without_its_last_event_is_no_completion(kind: Kind, address: str) -> None:
    with pytest.raises(ServiceError, match="before its last event"):
        await kind.call(address, "complete", "end early")


async def test_an_unknown_option_is_refused_before_the_call(address: str, scheduler: PlayedScheduler) -> None:
    async with AsyncClient(address) as client:
        with pytest.raises(TypeError, match="max_token"):
            client.generate("go", max_token=1)  # type: ignore[call-arg]  # the mistake under test
    assert scheduler.requests == []


async def test_answers_the_unary_calls(kind: Kind, address: str) -> None:
    tokens = await kind.call(address, "tokenize", "é")
    assert (list(tokens.token_ids), list(tokens.token_bytes)) == ([0xC3, 0xA9], [b"\xc3", b"\xa9"])
    assert await kind.call(address, "detokenize", [0xC3, 0xA9]) == "é"
    assert (await kind.call(address, "get_model")).name == "played"
    assert (await kind.call(address, "get_status")).num_running == 7
