"""A drain waits for the clients, not for the core alone; over real gRPC."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from moody_executor import MoodyExecutor
from services import TIMEOUT_S, process

from everystop.client import AsyncClient, Delta, Event, Finished, Retry
from everystop.errors import Reason, from_rpc_error
from everystop.scheduler.v1 import inference_pb2 as pb
from everystop.scheduler.v1 import inference_pb2_grpc
from everystop.settings import SchedulerConfig
from scheduler_svc import server
from scheduler_svc.server import RunningScheduler

NUM_TOKENS = 1000

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]


@asynccontextmanager
async def serving(mock_step_ms: float) -> AsyncIterator[RunningScheduler]:
    """A scheduler that is connected."""
    async with MoodyExecutor(mock_step_ms=mock_step_ms) as executor:
        running = await server.start(SchedulerConfig(listen="127.0.0.1:0", executor_address=executor.address))
        try:
            while running.loop.link is None:
                await asyncio.sleep(0.01)
            yield running
        finally:
            await running.stop()


@asynccontextmanager
async def unread_call(address: str, request: pb.GenerateRequest) -> AsyncIterator[Call]:
    """A call that takes nothing but the first 64 KiB that fit into HTTP/2's window."""
    async with grpc.aio.insecure_channel(address, options=(("grpc.http2.bdp_probe", 0),)) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)


async def read_all(call: Call) -> list[pb.GenerateResponse]:
    events = []
    while isinstance(event := await call.read(), pb.GenerateResponse):
        events.append(event)
    return events


async def test_a_drain_waits_until_the_answer_has_been_read() -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[65]),
        stop=pb.StopConditions(max_tokens=NUM_TOKENS),
        output=pb.OutputOptions(logprobs=20),
    )
    async with (
        asyncio.timeout(TIMEOUT_S),
        serving(mock_step_ms=0.1) as running,
        unread_call(running.address, request) as call,
    ):
        while running.loop.desk.ledger.outcomes["length"] == 0:
            await asyncio.sleep(0.01)
        running.lifecycle.drain(grace_s=TIMEOUT_S)
        drained = asyncio.create_task(running.lifecycle.drained.wait())
        await asyncio.wait({drained}, timeout=0.3)
        assert not drained.done(), "most of the answer is unread"
        events = await read_all(call)
        assert sum(len(event.delta.token_ids) for event in events) == NUM_TOKENS
        assert events[-1].HasField("finished")
        await drained


async def test_a_stop_tells_a_client_that_is_behind_why() -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[65] * 2000),
        stop=pb.StopConditions(max_tokens=NUM_TOKENS),
        output=pb.OutputOptions(prompt_logprobs=20),
    )
    async with (
        asyncio.timeout(TIMEOUT_S),
        serving(mock_step_ms=5.0) as running,
        unread_call(running.address, request) as call,
    ):
        while running.loop.core is None or not running.loop.core.counters.num_output_tokens:
            await asyncio.sleep(0.01)
        stopping = asyncio.create_task(running.stop())
        await asyncio.wait({stopping}, timeout=1.0)
        assert not stopping.done(), "the client has not been told yet"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.DRAINING)
        await stopping


async def test_a_signal_after_a_drain_leaves_the_running_requests_their_time(tmp_path: Path) -> None:
    """A container runtime sends SIGTERM to what an operator has asked to drain."""
    log = tmp_path / "log"
    async with MoodyExecutor(mock_step_ms=5.0) as executor, asyncio.timeout(TIMEOUT_S):
        flags = (f"--executor-address={executor.address}", "--log-format=json")
        with log.open("w") as stderr, process("scheduler_svc", tmp_path, *flags, stderr=stderr) as (child, address):
            async with AsyncClient(address, retry=Retry()) as client:
                stream = client.generate([65], max_tokens=200, temperature=0.0)
                while not isinstance(await anext(stream), Delta):
                    pass
                await client.drain()
                child.send_signal(signal.SIGTERM)
                while log.read_text().count('"draining"') < 2:
                    await asyncio.sleep(0.01)
                *_, last = await collect(stream)
                assert isinstance(last, Finished)
                assert last.usage.num_output_tokens == 200
            assert await asyncio.to_thread(child.wait, TIMEOUT_S) == 0


async def collect(stream: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in stream]
