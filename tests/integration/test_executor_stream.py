"""The step stream against a real executor: hand-made plans, the mock backend, real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from unittest import mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from everystop import channel, plan_codec
from everystop.errors import Reason, ServiceError, from_rpc_error
from everystop.executor.v1 import executor_pb2 as pb
from everystop.executor.v1 import executor_pb2_grpc as pb_grpc
from everystop.plan import ExecutorInfo, Hello, NewSequence, SamplingParams, StepPlan, StepResult
from everystop.settings import ExecutorConfig
from executor_svc import server
from executor_svc.backend import StepBatch, StepOutput
from executor_svc.engine import MAX_PLANS_IN_FLIGHT
from executor_svc.mock import MockBackend

HELLO = Hello(max_num_seqs=4, max_num_batched_tokens=64)

Serve = Callable[..., Coroutine[Any, Any, grpc.aio.Channel]]


class Peer:
    """The scheduler's end of one stream."""

    def __init__(self, grpc_channel: grpc.aio.Channel) -> None:
        self._call = pb_grpc.ExecutorServiceStub(grpc_channel).ExecuteSteps()

    async def hello(self, hello: Hello = HELLO) -> ExecutorInfo:
        await self._write(pb.ExecuteStepsRequest(hello=plan_codec.encode_hello(hello)))
        return plan_codec.decode_executor((await self._read()).executor)

    async def send(self, plan: StepPlan) -> None:
        await self._write(pb.ExecuteStepsRequest(plan=plan_codec.encode_plan(plan)))

    async def result(self) -> StepResult:
        return plan_codec.decode_result((await self._read()).result)

    async def error(self) -> ServiceError:
        """How the stream ends; results that come before are dropped."""
        while True:
            try:
                await self._read()
            except ServiceError as error:
                return error

    def cancel(self) -> None:
        self._call.cancel()

    async def finish(self) -> None:
        await self._call.done_writing()

    async def end(self) -> grpc.StatusCode:
        code: grpc.StatusCode = await self._call.code()
        return code

    async def _write(self, message: pb.ExecuteStepsRequest) -> None:
        try:
            await self._call.write(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    async def _read(self) -> pb.ExecuteStepsResponse:
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        assert isinstance(message, pb.ExecuteStepsResponse), "the stream ended without an error"
        return message


@asynccontextmanager
async def served(backend: MockBackend) -> AsyncIterator[grpc.aio.Channel]:
    running = await server.start(ExecutorConfig(listen="127.0.0.1:0"), backend)
    try:
        async with channel.client_channel(running.address) as grpc_channel:
            yield grpc_channel
    finally:
        await running.stop()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts an executor on the mock backend with the given settings; returns a channel to it."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> grpc.aio.Channel:
            config = ExecutorConfig(**{"mock_step_ms": 0.0, "num_blocks": 16, "block_size": 4, **settings})
            return await stack.enter_async_context(served(MockBackend(config)))

        yield start


def first_plan(epoch: int, step_id: int = 1) -> StepPlan:
    """Seats one sequence of 5 tokens in slot 2 and computes all of them."""
    sampling = SamplingParams(temperature=0.0)
    sequence = NewSequence(2, "request-a", 0, list(b"hello"), 5, 0, block_ids=[3, 7], sampling=sampling)
    return StepPlan(
        step_id, epoch, admissions=[sequence], chunk_slots=[2], chunk_num_tokens=[5], num_seqs=1, num_tokens=5
    )


def steady_plan(epoch: int, step_id: int) -> StepPlan:
    return StepPlan(step_id, epoch, num_seqs=1, num_tokens=1)


async def open_stream(grpc_channel: grpc.aio.Channel) -> tuple[Peer, int]:
    peer = Peer(grpc_channel)
    return peer, (await peer.hello()).epoch


async def test_the_handshake_tells_what_the_backend_offers(serve: Serve) -> None:
    executor = await Peer(await serve(max_model_len=100)).hello()
    assert (executor.block_size, executor.num_blocks, executor.max_model_len) == (4, 16, 100)
    assert (executor.backend, executor.model.name, executor.model.vocab_size) == ("mock", "mock", 259)
    assert 0 < executor.epoch < 2**63


async def test_a_decode_goes_on_without_being_named(serve: Serve) -> None:
    peer, epoch = await open_stream(await serve())
    await peer.send(first_plan(epoch))
    await peer.send(steady_plan(epoch, 2))
    await peer.send(steady_plan(epoch, 3))
    results = [await peer.result() for _ in range(3)]
    assert [result.step_id for result in results] == [1, 2, 3]
    assert [len(result.token_ids) for result in results] == [1, 1, 1]


async def test_timings_tell_waiting_from_computing(serve: Serve) -> None:
    peer, epoch = await open_stream(await serve(mock_step_ms=30.0))
    await peer.send(first_plan(epoch))
    await peer.send(steady_plan(epoch, 2))
    results = [await peer.result() for _ in range(2)]
    for result in results:
        assert 25_000 < result.timings.forward_us < 1_000_000
    # The second plan was there before the first step ended.
    assert results[1].timings.waited_us < 25_000
    await peer.send(steady_plan(epoch, 3))
    assert (await peer.result()).timings.waited_us > 0


async def test_a_stale_epoch_is_refused(serve: Serve) -> None:
    peer, epoch = await open_stream(await serve())
    await peer.send(first_plan(epoch ^ 1))
    error = await peer.error()
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.STALE_EPOCH)
    assert error.field == "epoch"


@pytest.mark.parametrize("step_id", [1, 3])
async def test_a_gap_and_a_repetition_of_steps_are_refused(serve: Serve, step_id: int) -> None:
    peer, epoch = await open_stream(await serve())
    await peer.send(first_plan(epoch))
    await peer.send(steady_plan(epoch, step_id))
    assert (await peer.result()).step_id == 1
    error = await peer.error()
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.STEP_GAP)


async def test_a_block_out_of_range_is_refused_with_its_limit(serve: Serve) -> None:
    peer, epoch = await open_stream(await serve())
    plan = first_plan(epoch)
    plan.admissions[0].block_ids[1] = 16
    await peer.send(plan)
    error = await peer.error()
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_PLAN)
    assert error.field == "admissions[0].block_ids"
    assert "num_blocks 16" in error.message


async def test_a_newer_scheduler_takes_over(serve: Serve) -> None:
    grpc_channel = await serve()
    old, old_epoch = await open_stream(grpc_channel)
    await old.send(first_plan(old_epoch))
    await old.result()
    new, new_epoch = await open_stream(grpc_channel)
    error = await old.error()
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, Reason.SUPERSEDED)
    assert new_epoch != old_epoch
    # The slots of the old session are free, its blocks too.
    await new.send(first_plan(new_epoch))
    assert (await new.result()).step_id == 1


async def test_a_broken_stream_leaves_nothing_behind(serve: Serve) -> None:
    grpc_channel = await serve()
    peer, epoch = await open_stream(grpc_channel)
    await peer.send(first_plan(epoch))
    before = await peer.result()
    peer.cancel()
    again, new_epoch = await open_stream(grpc_channel)
    assert new_epoch != epoch
    await again.send(first_plan(new_epoch))
    assert (await again.result()).token_ids == before.token_ids


async def test_a_scheduler_that_finishes_ends_the_stream_without_an_error(serve: Serve) -> None:
    peer, _ = await open_stream(await serve())
    await peer.finish()
    assert await peer.end() is grpc.StatusCode.OK


async def test_a_step_that_raises_ends_the_session_and_not_the_executor(serve: Serve) -> None:
    grpc_channel = await serve(mock_fail="error@2")
    peer, epoch = await open_stream(grpc_channel)
    await peer.send(first_plan(epoch))
    before = await peer.result()
    await peer.send(steady_plan(epoch, 2))
    await peer.send(steady_plan(epoch, 3))
    error = await peer.error()
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, Reason.INTERNAL)
    assert "step 2" in error.message
    again, new_epoch = await open_stream(grpc_channel)
    await again.send(first_plan(new_epoch))
    assert (await again.result()).token_ids == before.token_ids


async def test_garbage_on_demand_is_outside_of_the_vocabulary(serve: Serve) -> None:
    peer, epoch = await open_stream(await serve(mock_fail="garbage@1"))
    await peer.send(first_plan(epoch))
    assert (await peer.result()).token_ids[0] >= 259


async def test_a_failed_sequence_counts_in_until_it_exits(serve: Serve) -> None:
    peer, epoch = await open_stream(await serve(mock_fail="sequence@1"))
    await peer.send(first_plan(epoch))
    await peer.send(steady_plan(epoch, 2))
    failed, surplus = await peer.result(), await peer.result()
    assert [failure.slot for failure in failed.failures] == [2]
    assert failed.token_ids == [0]
    assert len(surplus.token_ids) == 1


class BrokenBackend(MockBackend):
    """Fails for good at its first step."""

    is_broken = False

    def execute(self, batch: StepBatch) -> StepOutput:
        self.is_broken = True
        raise RuntimeError("the device is gone")

    def reset(self) -> None:
        if self.is_broken:
            raise RuntimeError("the device is still gone")
        super().reset()


async def test_a_backend_that_cannot_be_reset_breaks_the_executor() -> None:
    running = await server.start(ExecutorConfig(listen="127.0.0.1:0"), BrokenBackend(ExecutorConfig()))
    async with channel.client_channel(running.address) as grpc_channel:
        peer, epoch = await open_stream(grpc_channel)
        await peer.send(first_plan(epoch))
        assert (await peer.error()).reason in (Reason.INTERNAL, Reason.NO_EXECUTOR)
        await running.wait_broken()
        with pytest.raises(ServiceError) as refused:
            await Peer(grpc_channel).hello()
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    await running.stop()


async def test_a_flood_of_plans_is_refused(serve: Serve) -> None:
    peer, epoch = await open_stream(await serve(mock_fail="slow@1:300"))
    await peer.send(first_plan(epoch))
    for step_id in range(2, MAX_PLANS_IN_FLIGHT + 2):
        await peer.send(steady_plan(epoch, step_id))
    error = await peer.error()
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"{MAX_PLANS_IN_FLIGHT} plans" in error.message


@pytest.mark.parametrize(
    ("hello", "code", "reason", "field"),
    [
        (Hello(257, 512), grpc.StatusCode.FAILED_PRECONDITION, Reason.EXECUTOR_LIMIT, "max_num_seqs"),
        (Hello(4, 9000), grpc.StatusCode.FAILED_PRECONDITION, Reason.EXECUTOR_LIMIT, "max_num_batched_tokens"),
        (Hello(0, 64), grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD, "max_num_seqs"),
        (Hello(4, 64, 99), grpc.StatusCode.FAILED_PRECONDITION, Reason.PROTOCOL_VERSION, "protocol_version"),
    ],
)
async def test_a_hello_out_of_limits_is_refused(
    serve: Serve, hello: Hello, code: grpc.StatusCode, reason: Reason, field: str
) -> None:
    with pytest.raises(ServiceError) as refused:
        await Peer(await serve()).hello(hello)
    assert (refused.value.code, refused.value.reason, refused.value.field) == (code, reason, field)


async def test_the_first_message_must_be_a_hello(serve: Serve) -> None:
    peer = Peer(await serve())
    await peer.send(first_plan(1))
    error = await peer.error()
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "hello")


async def test_a_second_hello_is_refused(serve: Serve) -> None:
    peer, _ = await open_stream(await serve())
    with pytest.raises(ServiceError) as refused:
        await peer.hello()
    assert (refused.value.code, refused.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, "plan")


async def test_tokenizer_files_come_whole_in_pieces() -> None:
    class BigFiles(MockBackend):
        def tokenizer_files(self) -> dict[str, bytes]:
            return {"tokenizer.json": bytes(3 * 2**20 + 1), "empty": b"", "tokenizer_config.json": b"{}"}

    async with served(BigFiles(ExecutorConfig())) as grpc_channel:
        stub = pb_grpc.ExecutorServiceStub(grpc_channel)
        pieces = [piece async for piece in stub.GetTokenizer(pb.GetTokenizerRequest())]
    files: dict[str, bytes] = {}
    for piece in pieces:
        assert len(piece.content) <= 2**20
        files[piece.file_name] = files.get(piece.file_name, b"") + piece.content
    assert files == {"tokenizer.json": bytes(3 * 2**20 + 1), "empty": b"", "tokenizer_config.json": b"{}"}


async def test_health_is_serving_once_it_listens(serve: Serve) -> None:
    stub = health_pb2_grpc.HealthStub(await serve())
    for service in ("", "everystop.executor.v1.ExecutorService"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_stopping_tells_the_scheduler() -> None:
    running = await server.start(ExecutorConfig(listen="127.0.0.1:0"), MockBackend(ExecutorConfig()))
    async with channel.client_channel(running.address) as grpc_channel:
        peer, _ = await open_stream(grpc_channel)
        await running.stop()
        assert (await peer.error()).code is grpc.StatusCode.UNAVAILABLE


def raw_stream(grpc_channel: grpc.aio.Channel) -> Any:
    """A call that sends bytes as they are."""
    return grpc_channel.stream_stream(
        "/everystop.executor.v1.ExecutorService/ExecuteSteps",
        request_serializer=bytes,
        response_deserializer=pb.ExecuteStepsResponse.FromString,
    )()


@pytest.mark.parametrize("is_greeted", [False, True])
async def test_bytes_that_are_no_message_end_the_stream_with_a_typed_error(serve: Serve, is_greeted: bool) -> None:
    grpc_channel = await serve()
    call = raw_stream(grpc_channel)
    if is_greeted:
        await call.write(pb.ExecuteStepsRequest(hello=plan_codec.encode_hello(HELLO)).SerializeToString())
        await call.read()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), 10)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.UNDECODABLE)
    await open_stream(grpc_channel)  # the next scheduler is served


async def test_a_plan_that_cannot_be_read_ends_the_stream_with_a_typed_error(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, epoch = await open_stream(await serve())
    monkeypatch.setattr(plan_codec, "decode_plan", mock.Mock(side_effect=OverflowError("too much")))
    await peer.send(first_plan(epoch))
    error = await asyncio.wait_for(peer.error(), 10)
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, Reason.INTERNAL)
    assert "OverflowError: too much" in error.message
