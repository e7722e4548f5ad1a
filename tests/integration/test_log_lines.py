"""One canonical line per request, and what a death leaves behind."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

import executor_svc.server
import scheduler_svc.server
from everystop import channel
from everystop.client import AsyncClient, Client, Delta
from everystop.errors import ServiceError
from everystop.scheduler.v1 import inference_pb2 as pb
from everystop.scheduler.v1 import inference_pb2_grpc
from everystop.settings import ExecutorConfig, SchedulerConfig
from everystop.testing import serve_mock
from executor_svc.mock import MockBackend


def only(lines: list[dict[str, Any]], event: str) -> dict[str, Any]:
    (line,) = [line for line in lines if line["event"] == event]
    return line


async def start_both() -> tuple[executor_svc.server.RunningExecutor, scheduler_svc.server.RunningScheduler]:
    executor_config = ExecutorConfig(listen="127.0.0.1:0", backend="mock", mock_step_ms=5.0)
    executor = await executor_svc.server.start(executor_config, MockBackend(executor_config))
    scheduler = await scheduler_svc.server.start(
        SchedulerConfig(listen="127.0.0.1:0", executor_address=executor.address)
    )
    while scheduler.loop.link is None:
        await asyncio.sleep(0)
    return executor, scheduler


def test_a_request_leaves_one_line(lines: list[dict[str, Any]]) -> None:
    with serve_mock() as service, Client(service.address) as client:
        answer = client.complete("hello", max_tokens=7, ignore_eos=True, request_id="one", tenant="blue")
    line = only(lines, "request_finished")
    assert line["log_level"] == "info"
    times = ("queued_ms", "first_token_ms", "total_ms")
    assert {name: value for name, value in line.items() if name not in times} == {
        "event": "request_finished",
        "log_level": "info",
        "request_id": "one",
        "tenant": "blue",
        "reason": "length",
        "num_prompt_tokens": 5,
        "num_resumed_tokens": 0,
        "num_cached_tokens": 0,
        "num_output_tokens": 7,
        "num_attempts": 1,
        "num_preemptions": 0,
        "num_recomputed_tokens": 0,
    }
    assert 0 <= line["queued_ms"] <= line["first_token_ms"] <= line["total_ms"]
    assert line["total_ms"] == pytest.approx(answer.timings.total_ms, abs=50)


def test_a_resumed_request_says_what_it_came_with(lines: list[dict[str, Any]]) -> None:
    request = pb.GenerateRequest(text="hello", resume=pb.Resume(token_ids=b"abc"))
    request.sampling.seed = 0
    request.stop.max_tokens = 7
    with serve_mock() as service, channel.sync_channel(service.address) as grpc_channel:
        list(inference_pb2_grpc.InferenceServiceStub(grpc_channel).Generate(request))
    line = only(lines, "request_finished")
    assert (line["num_resumed_tokens"], line["num_output_tokens"]) == (3, 7)


def test_a_request_that_was_refused_leaves_one_line(lines: list[dict[str, Any]]) -> None:
    with serve_mock() as service, Client(service.address) as client:
        for request_id in ("bad", "x" * 100_000):
            with pytest.raises(ServiceError):
                client.complete("hello", max_tokens=0, request_id=request_id, tenant="t" * 100_000)
    refusals = [line for line in lines if line["event"] == "request_refused"]
    assert [line["reason"] for line in refusals] == ["INVALID_FIELD", "INVALID_FIELD"]
    assert [line["request_id"] for line in refusals] == ["bad", "x" * 128]
    assert refusals[0]["tenant"] == "t" * 128
    assert all(line["message"].startswith(("tenant: ", "request_id: ")) for line in refusals)
    assert not [line for line in lines if line["event"] == "request_finished"]


def test_a_lost_executor_leaves_what_it_held(lines: list[dict[str, Any]]) -> None:
    with serve_mock(mock_step_ms=5.0) as service, Client(service.address) as client:
        stream = client.generate("hello", max_tokens=60, ignore_eos=True, request_id="survivor")
        next(event for event in stream if isinstance(event, Delta))
        service.stop_executor()
        service.start_executor()
        assert list(stream)[-1].usage.num_output_tokens == 60
    lost = only(lines, "executor_lost")
    assert (lost["request_ids"], lost["num_requests"], lost["num_running"]) == (["survivor"], 1, 1)
    assert "shutting down" in lost["reason"]
    assert 1 <= len(lost["step_ids"]) <= 2
    # Both sides name the connection alike.
    epochs = [line["epoch"] for line in lines if line["event"] == "session_opened"]
    assert len(epochs) == 2
    assert lost["epoch"] == epochs[0]
    finished = only(lines, "request_finished")
    assert (finished["num_attempts"], finished["num_preemptions"]) == (2, 0)
    assert finished["num_recomputed_tokens"] > 0


def test_a_lost_scheduler_leaves_what_it_held(lines: list[dict[str, Any]]) -> None:
    async def scenario() -> None:
        executor, scheduler = await start_both()
        async with AsyncClient(scheduler.address, retry=None) as client:
            stream = client.generate("hello", max_tokens=3000, ignore_eos=True, request_id="orphan")
            with suppress(ServiceError):
                async for event in stream:
                    if isinstance(event, Delta):
                        await scheduler.stop()
        await executor.stop()

    asyncio.run(scenario())
    closed = only(lines, "session_closed")
    assert (closed["num_seqs"], closed["request_ids"]) == (1, ["orphan"])
    assert closed["last_step_id"] >= 1


def test_a_crash_of_the_scheduler_leaves_what_it_held(lines: list[dict[str, Any]]) -> None:
    def broken(*_arguments: object) -> None:
        raise RuntimeError("a bug")

    async def scenario() -> None:
        executor, scheduler = await start_both()
        async with AsyncClient(scheduler.address, retry=None) as client:
            streams = [
                client.generate("hello", max_tokens=3000, ignore_eos=True, request_id=f"number {index}")
                for index in range(40)
            ]
            for stream in streams:
                while not isinstance(await anext(stream), Delta):
                    pass
            scheduler.loop.core.apply = broken
            await asyncio.wait({scheduler.failed})
            with suppress(BaseExceptionGroup):
                await scheduler.stop()
        await executor.stop()

    asyncio.run(scenario())
    crashed = only(lines, "scheduler_crashed")
    assert crashed["exc_info"] is True
    assert (crashed["num_requests"], crashed["num_running"], crashed["num_waiting"]) == (40, 40, 0)
    assert crashed["request_ids"] == [f"number {index}" for index in range(32)]
    assert len(crashed["step_ids"]) == 2


def test_a_step_that_fails_says_whom_it_hit(lines: list[dict[str, Any]]) -> None:
    with serve_mock(mock_step_ms=2.0) as service, Client(service.address) as client:
        engine = service._executor._engine
        execute = engine._backend.execute

        def fail_once(batch):
            engine._backend.execute = execute
            raise RuntimeError("no such kernel")

        stream = client.generate("hello", max_tokens=30, ignore_eos=True, request_id="hit")
        next(event for event in stream if isinstance(event, Delta))
        engine._backend.execute = fail_once
        assert list(stream)[-1].usage.num_output_tokens == 30
        assert engine.stats.num_failed_steps == 1
    failed = only(lines, "step_failed")
    assert (failed["request_ids"], failed["num_seqs"]) == (["hit"], 1)
    assert failed["step_id"] == failed["last_step_id"] > 1
    assert "no such kernel" in only(lines, "executor_lost")["reason"]
