"""A client that does not read holds nothing of ours for longer than the limit; over real gRPC."""

from __future__ import annotations

import asyncio
import gc

import grpc
import pytest
from moody_executor import MoodyExecutor
from services import TIMEOUT_S, scheduling
from structlog.testing import capture_logs

from everystop.errors import Reason, from_rpc_error
from everystop.scheduler.v1 import inference_pb2 as pb
from everystop.scheduler.v1 import inference_pb2_grpc
from scheduler_svc import servicer
from scheduler_svc.stream import RequestStream


@pytest.mark.parametrize("num_tokens", [1000, 100_000], ids=["complete", "running"])
async def test_an_answer_that_nobody_reads_is_gone_while_its_client_stays(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "_ABORT_TIMEOUT_S", 0.1)
    request_id = f"unread-{num_tokens}"
    request = pb.GenerateRequest(
        request_id=request_id,
        token_ids=pb.TokenIds(ids=[65]),
        stop=pb.StopConditions(max_tokens=num_tokens),
        output=pb.OutputOptions(logprobs=20),
    )
    async with (
        asyncio.timeout(TIMEOUT_S),
        MoodyExecutor(mock_step_ms=0.1) as executor,
        scheduling(executor.address, max_unread_s=3.0) as scheduler,
        grpc.aio.insecure_channel(scheduler.client.address, options=(("grpc.http2.bdp_probe", 0),)) as channel,
    ):
        await scheduler.until("connected")
        desk = scheduler.loop.desk
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        while not desk.ledger.num_submitted:
            await asyncio.sleep(0.01)
        await desk.empty.wait()
        assert sum(desk.ledger.outcomes.values()) == 1
        await asyncio.sleep(0)  # the task of the call is over now, too
        gc.collect()
        streams = [found for found in gc.get_objects() if type(found) is RequestStream]
        assert request_id not in [stream.request.request_id for stream in streams]
        assert not call.done()
        # Who reads after all learns how it ended.
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(call)
        assert from_rpc_error(caught.value).reason is Reason.SLOW_READER


async def test_a_client_that_goes_away_without_reading_is_no_bug() -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[65] * 2000),
        stop=pb.StopConditions(max_tokens=50_000),
        output=pb.OutputOptions(prompt_logprobs=20),
    )
    async with (
        asyncio.timeout(TIMEOUT_S),
        MoodyExecutor(mock_step_ms=2.0) as executor,
        scheduling(executor.address) as scheduler,
        grpc.aio.insecure_channel(scheduler.client.address, options=(("grpc.http2.bdp_probe", 0),)) as channel,
    ):
        await scheduler.until("connected")
        core, desk = scheduler.loop.core, scheduler.loop.desk
        assert core is not None
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        with capture_logs() as lines:
            while not core.counters.num_output_tokens:
                await asyncio.sleep(0.01)
            call.cancel()
            await desk.empty.wait()
        assert desk.ledger.outcomes == {"cancelled": 1}
        assert "call_failed" not in [line["event"] for line in lines]


async def read_all(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]) -> None:
    while isinstance(await call.read(), pb.GenerateResponse):
        pass
