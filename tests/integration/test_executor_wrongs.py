"""Executors that do whatever is wrong, over real gRPC: streams pause, go on with the next one, and stay exact."""

from __future__ import annotations

import asyncio

import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from moody_executor import Behaviour, Context, MoodyExecutor, Requests, executor_info, says
from services import Scheduling, check_exact, scheduling

import scheduler_svc.loop
from everystop import channel, log
from everystop.executor.v1 import executor_pb2 as pb
from everystop.scheduler.v1 import admin_pb2
from scheduler_svc.lifecycle import INFERENCE_SERVICE

NUM_STREAMS = 4
RESULT = pb.ExecuteStepsResponse(result=pb.StepResult(step_id=1))
INFO = pb.ExecuteStepsResponse(executor=executor_info())


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Wrongs are logged, again and again."""
    if not structlog.is_configured():
        log.configure("auto", "error")


async def until_running(scheduler: Scheduling) -> None:
    while (await scheduler.client.get_status()).counters.num_output_tokens < NUM_STREAMS * 5:
        await asyncio.sleep(0)


async def nothing(requests: Requests, context: Context) -> None:
    await asyncio.Event().wait()


async def farewell(requests: Requests, context: Context) -> None:
    """Ends at once, without an error."""


async def bug(requests: Requests, context: Context) -> None:
    raise RuntimeError("a bug of the executor")


async def unasked(requests: Requests, context: Context) -> None:
    """Sends results to plans that nobody sent."""
    await context.write(INFO)
    for _ in range(100):
        await context.write(RESULT)
    await nothing(requests, context)


WRONGS: dict[str, tuple[Behaviour, str]] = {
    "no handshake": (nothing, "no handshake within 0.3 s"),
    "no results": (says(INFO), "a step took longer than 0.5 s"),
    "an end": (farewell, "answered garbage: expected the executor's side of the handshake"),
    "a bug": (bug, "a bug of the executor"),
    "bytes for a handshake": (says(b"\xff\xff\xff"), "answered garbage"),
    "a result for a handshake": (says(RESULT), "answered garbage"),
    "a handshake without numbers": (
        says(pb.ExecuteStepsResponse(executor=pb.ExecutorInfo(protocol_version=1))),
        "block_size is 0",
    ),
    "blocks without end": (
        says(pb.ExecuteStepsResponse(executor=executor_info(num_blocks=2**32 - 1))),
        "num_blocks is 4294967295",
    ),
    "another protocol": (
        says(pb.ExecuteStepsResponse(executor=executor_info(protocol_version=99))),
        "protocol version 99",
    ),
    "another model": (
        says(pb.ExecuteStepsResponse(executor=executor_info(model={"fingerprint": "of another"}))),
        "the executor came back with another model",
    ),
    "another block size": (
        says(pb.ExecuteStepsResponse(executor=executor_info(block_size=8))),
        "the executor came back with another block_size: 8, was 16",
    ),
    "bytes for a result": (says(INFO, b"\xff\xff\xff"), "the executor closed the stream"),
    "a handshake again": (says(INFO, INFO), "answered garbage: expected a result"),
    "a result that is none": (says(INFO, RESULT), "answered garbage"),
    "results to nothing": (unasked, "answered garbage"),
}


@pytest.mark.parametrize("name", WRONGS)
async def test_streams_survive_what_an_executor_does_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_svc.loop, "HANDSHAKE_TIMEOUT_S", 0.3)
    wrong, reason = WRONGS[name]
    async with MoodyExecutor() as executor, scheduling(executor.address, step_timeout_s=0.5) as scheduler:
        await scheduler.until("connected")
        async with asyncio.TaskGroup() as streams:
            for index in range(NUM_STREAMS):
                streams.create_task(check_exact(scheduler.client, index))
            await until_running(scheduler)
            executor.break_off(wrong)
            await scheduler.until(reason)
        status = await scheduler.client.get_status()
        assert executor.num_connections >= 3
        assert (status.num_running, status.num_waiting, status.blocks.num_used_blocks) == (0, 0, 0)


@pytest.mark.parametrize("failure", ["garbage", "error"])
async def test_streams_survive_steps_that_fail(failure: str) -> None:
    """In each of the two engines, in its sixth step and in its twentieth."""
    failures = f"{failure}@6,{failure}@20"
    async with MoodyExecutor(mock_fail=failures) as executor, scheduling(executor.address) as scheduler:
        await scheduler.until("connected")
        await asyncio.gather(*[check_exact(scheduler.client, index) for index in range(NUM_STREAMS)])
        assert executor.num_connections == 5


async def test_a_first_executor_that_is_wrong_in_every_way_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_svc.loop, "HANDSHAKE_TIMEOUT_S", 0.3)
    wrongs = [wrong for name, (wrong, _) in WRONGS.items() if name.endswith("handshake") or name in ("an end", "a bug")]
    async with MoodyExecutor() as executor:
        executor.moods.extend(wrongs)
        async with scheduling(executor.address) as scheduler:
            await scheduler.until("connected")
            assert executor.num_connections > len(wrongs)
            await check_exact(scheduler.client, 1)


@pytest.mark.parametrize(
    "files", [{}, {"tokenizer.json": b"{"}, {"tokenizer.json": b"[]", "tokenizer_config.json": b"7"}]
)
async def test_a_tokenizer_that_is_none_is_told_and_waited_out(files: dict[str, bytes]) -> None:
    async with MoodyExecutor() as executor:
        executor.tokenizer_files = files
        async with scheduling(executor.address) as scheduler:
            await scheduler.until("the model's tokenizer can't be used")
            executor.tokenizer_files = None
            await scheduler.until("connected")
            await check_exact(scheduler.client, 1)


async def test_two_executors_that_take_turns_are_never_mixed_up() -> None:
    """Each connection goes to the other one of two engines; the one that was left knows no better than to go on."""
    async with MoodyExecutor(mock_step_ms=3.0) as executor, scheduling(executor.address, max_losses=100) as scheduler:
        await scheduler.until("connected")
        async with asyncio.TaskGroup() as streams:
            for index in range(NUM_STREAMS):
                streams.create_task(check_exact(scheduler.client, index))
            await until_running(scheduler)
            for _ in range(5):
                num_connections = executor.num_connections
                executor.break_off()
                while executor.num_connections == num_connections:
                    await asyncio.sleep(0.01)
        assert executor.num_connections > 5


async def test_two_schedulers_of_one_executor_both_get_their_answers() -> None:
    async with MoodyExecutor() as executor:
        # One engine, as in reality: the newer connection takes the place of the older one.
        executor._servicers[1] = executor._servicers[0]
        async with scheduling(executor.address) as one, scheduling(executor.address) as other:
            await asyncio.gather(one.until("connected"), other.until("connected"))
            await asyncio.gather(
                *[check_exact(scheduler.client, index) for scheduler in (one, other) for index in range(2)]
            )
            superseded = await asyncio.gather(*[scheduler.client.get_status() for scheduler in (one, other)])
    assert sum(status.counters.num_executor_connections for status in superseded) >= 3


async def test_a_port_that_accepts_and_never_answers_is_waited_out() -> None:
    """TCP alone, no HTTP/2: as from a machine that hangs."""

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set()
        held.append(writer)
        await reader.read()

    accepted, held = asyncio.Event(), list[asyncio.StreamWriter]()
    listener = await asyncio.start_server(hold, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with scheduling(address) as scheduler:
        await accepted.wait()
        status = await scheduler.client.get_status()
        assert status.state == admin_pb2.SCHEDULER_STATE_CONNECTING
        assert status.state_reason == f"no executor at {address} has answered yet"
        listener.close()
        for writer in held:
            writer.close()
        async with MoodyExecutor(listen=address):
            await scheduler.until("connected")
            await check_exact(scheduler.client, 1)


async def test_an_executor_that_is_refused_again_and_again_turns_health_not_serving() -> None:
    """What counts is the time since the loss, not since the last try."""
    model = says(pb.ExecuteStepsResponse(executor=executor_info(model={"fingerprint": "of another"})))
    async with MoodyExecutor() as executor, scheduling(executor.address, unready_after_s=1.0) as scheduler:
        await scheduler.until("connected")
        async with channel.client_channel(scheduler.client.address) as grpc_channel:
            watch = health_pb2_grpc.HealthStub(grpc_channel).Watch(
                health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE)
            )
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            lost_at = asyncio.get_running_loop().time()
            executor.break_off(*[model] * 8)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert 0.9 < asyncio.get_running_loop().time() - lost_at < 2.5
            assert executor.moods, "it is refused still"
            assert "another model" in (await scheduler.client.get_status()).state_reason
            executor.moods.clear()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_short_loss_is_not_told_to_load_balancers() -> None:
    async with MoodyExecutor() as executor, scheduling(executor.address, unready_after_s=30.0) as scheduler:
        await scheduler.until("connected")
        async with channel.client_channel(scheduler.client.address) as grpc_channel:
            check = health_pb2_grpc.HealthStub(grpc_channel).Check
            executor.break_off()
            await scheduler.until("lost")
            response = await check(health_pb2.HealthCheckRequest(service=INFERENCE_SERVICE))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
