"""How long a request may wait and run, what ends it, and what is left of it then; over real gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from moody_executor import MoodyExecutor
from services import check_exact, scheduling

from everystop.client import AsyncClient, Completion, Delta
from everystop.errors import Reason, ServiceError
from everystop.scheduler.v1 import inference_pb2 as pb
from everystop.scheduler.v1 import inference_pb2_grpc
from scheduler_svc.core import Scheduler

LONG = 100_000
# By the place where a request is when it ends: its prompt, and what is needed for it to be there.
PLACES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "queue": ([65], {"max_num_seqs": 1}),
    "prefill": ([65] * LONG, {"max_prefill_chunk": 4, "max_num_batched_tokens": 64}),
    "decode": ([65], {}),
}


async def refusal(call: Any) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await call
    return caught.value


async def first_delta(client: AsyncClient, **options: Any) -> Any:
    """A stream that has begun to bring tokens."""
    stream = client.generate([66], max_tokens=LONG, temperature=0.0, **options)
    while not isinstance(await anext(stream), Delta):
        pass
    return stream


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("place", PLACES)
async def test_a_deadline_counts_wherever_the_request_is(place: str) -> None:
    prompt, settings = PLACES[place]
    async with (
        MoodyExecutor(mock_step_ms=5.0, max_model_len=3 * LONG, num_blocks=40_000) as executor,
        scheduling(executor.address, **settings) as scheduler,
    ):
        await scheduler.until("connected")
        other = await first_delta(scheduler.client)
        error = await refusal(scheduler.client.complete(prompt, max_tokens=LONG, timeout=0.4, request_id="late"))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        core = scheduler.loop.core
        assert core is not None
        async with asyncio.timeout(5):
            while "late" in core.requests:
                await asyncio.sleep(0)
        assert core.num_waiting == 0
        assert core.num_running == 1
        assert isinstance(await anext(other), Delta)
        await other.aclose()
        await scheduler.until_idle()


@pytest.mark.parametrize("place", PLACES)
async def test_a_cancelled_request_is_gone_within_two_steps(place: str) -> None:
    prompt, settings = PLACES[place]
    async with (
        MoodyExecutor(mock_step_ms=100.0, max_model_len=3 * LONG, num_blocks=40_000) as executor,
        scheduling(executor.address, **settings) as scheduler,
    ):
        await scheduler.until("connected")
        other = await first_delta(scheduler.client)
        stream = scheduler.client.generate(prompt, max_tokens=LONG, request_id="gone")
        await anext(stream)
        core = scheduler.loop.core
        assert core is not None
        wanted = {"queue": lambda: core.num_waiting == 1}.get(place, lambda: core.num_running == 2)
        while not wanted():
            await asyncio.sleep(0)
        num_steps = scheduler.loop.stats.num_steps
        await stream.aclose()
        while "gone" in core.requests:
            await asyncio.sleep(0)
        assert scheduler.loop.stats.num_steps <= num_steps + 2
        assert core.num_used_blocks == 1
        await other.aclose()
        await scheduler.until_idle()


async def test_a_cancelled_id_used_again_belongs_to_the_new_request() -> None:
    """Again and again, while tokens of the cancelled one are on their way."""
    async with MoodyExecutor(mock_step_ms=2.0) as executor, scheduling(executor.address) as scheduler:
        await scheduler.until("connected")

        async def complete_when_free(prompt: list[int], **options: Any) -> Completion:
            """The server hears of the cancel a moment later; until then the id is in use."""
            while True:
                try:
                    return await scheduler.client.complete(prompt, **options)
                except ServiceError as error:
                    if error.reason is not Reason.REQUEST_ID_IN_USE:
                        raise

        wanted = [await scheduler.client.complete([65 + i], max_tokens=12, temperature=0.0) for i in range(10)]
        for prompt in range(10):
            stream = await first_delta(scheduler.client, request_id="again")
            await stream.aclose()
            answer = await complete_when_free([65 + prompt], max_tokens=12, temperature=0.0, request_id="again")
            assert answer.token_ids == wanted[prompt].token_ids
        await scheduler.until_idle()


async def test_a_request_waits_for_its_first_step_no_longer_than_it_may() -> None:
    async with (
        MoodyExecutor(mock_step_ms=5.0) as executor,
        scheduling(executor.address, max_num_seqs=1, max_wait_s=0.3) as scheduler,
    ):
        await scheduler.until("connected")
        running = await first_delta(scheduler.client)
        error = await refusal(scheduler.client.complete([65], max_tokens=1))
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.TIME_LIMIT)
        assert "waited for 0.3 s" in error.message
        # The one that runs has long been in for more than that, and goes on.
        for _ in range(150):
            assert isinstance(await anext(running), Delta)
        await running.aclose()
        await scheduler.until_idle()


async def test_a_request_takes_no_longer_than_it_may() -> None:
    async with MoodyExecutor() as executor, scheduling(executor.address, max_request_s=0.4) as scheduler:
        await scheduler.until("connected")
        started_at = asyncio.get_running_loop().time()
        error = await refusal(scheduler.client.complete([65], max_tokens=LONG))
        assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, Reason.TIME_LIMIT)
        assert "took 0.4 s" in error.message
        assert 0.35 < asyncio.get_running_loop().time() - started_at < 5.0
        await scheduler.until_idle()


async def test_the_queue_is_full_by_tokens_too() -> None:
    async with (
        MoodyExecutor(mock_step_ms=20.0) as executor,
        scheduling(executor.address, max_num_seqs=1, max_waiting_tokens=100) as scheduler,
    ):
        await scheduler.until("connected")
        running = await first_delta(scheduler.client)
        alone = scheduler.client.generate([65] * 120, max_tokens=1)
        await anext(alone)  # one that is too large for the queue still gets in when the queue is empty
        error = await refusal(scheduler.client.complete([65], max_tokens=1))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL)
        assert error.retry_after_s is not None
        assert "100 that may" in error.message
        await alone.aclose()
        await running.aclose()
        await scheduler.until_idle()


async def test_a_client_that_stops_reading_is_cut_off_and_costs_nobody_anything() -> None:
    async with MoodyExecutor(mock_step_ms=0.5) as executor, scheduling(executor.address, max_unread_s=1.0) as scheduler:
        await scheduler.until("connected")
        small_window = (("grpc.http2.bdp_probe", 0),)
        async with grpc.aio.insecure_channel(scheduler.client.address, options=small_window) as channel:
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[65]),
                stop=pb.StopConditions(max_tokens=LONG),
                output=pb.OutputOptions(logprobs=20),
            )
            call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
            await call.read()
            async with asyncio.timeout(20):
                while not scheduler.loop.desk.ledger.outcomes["slow_reader"]:
                    await check_exact(scheduler.client, 1, max_tokens=20)
            assert isinstance(scheduler.loop.core, Scheduler)
            assert (scheduler.loop.core.num_used_blocks, scheduler.loop.desk.num_requests) == (0, 0)
            with pytest.raises(grpc.aio.AioRpcError, match="nothing of the answer was read for 1 s") as cut:
                await read_to_the_end(call)
            assert cut.value.code() is grpc.StatusCode.ABORTED


async def test_a_client_that_reads_slowly_is_not_cut_off() -> None:
    async with MoodyExecutor() as executor, scheduling(executor.address, max_unread_s=0.5) as scheduler:
        await scheduler.until("connected")
        events = []
        async for event in scheduler.client.generate([65], max_tokens=50, temperature=0.0):
            events.append(event)
            if len(events) <= 5:
                await asyncio.sleep(0.3)
        assert sum(len(event.token_ids) for event in events if isinstance(event, Delta)) == 50
