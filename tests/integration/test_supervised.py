"""Services that can be hurt, with the mock executor as one."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from everystop.channel import client_channel
from everystop.child import ChildExitedError
from everystop_lab.supervised import SupervisedService
from everystop_lab.usage import usage_of

TIMEOUT_S = 30.0


@pytest.fixture
async def executor(tmp_path: Path) -> AsyncIterator[SupervisedService]:
    with (tmp_path / "log").open("wb") as log:
        service = SupervisedService("executor_svc", ["--backend=mock"], tmp_path, log)
        await service.start()
        yield service
        await service.stop()


async def answers(service: SupervisedService, timeout_s: float = TIMEOUT_S) -> bool:
    async with client_channel(service.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            await check(health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True)
        except grpc.aio.AioRpcError:
            return False
    return True


async def test_a_killed_service_comes_back_at_its_address(executor: SupervisedService) -> None:
    pid = executor.pid
    await executor.kill()
    assert not executor.ready.is_set()
    await asyncio.wait_for(executor.ready.wait(), TIMEOUT_S)
    assert executor.pid != pid
    assert await answers(executor)
    assert executor.num_unexpected_exits == 0


async def test_a_service_that_ends_by_itself_is_counted(executor: SupervisedService) -> None:
    os.kill(executor.pid, signal.SIGKILL)
    while executor.ready.is_set():
        await asyncio.sleep(0)
    await asyncio.wait_for(executor.ready.wait(), TIMEOUT_S)
    assert executor.num_unexpected_exits == 1


async def test_a_halted_service_is_silent_and_then_goes_on(executor: SupervisedService) -> None:
    pid = executor.pid
    halting = asyncio.create_task(executor.halt(1.5, then_kill=False))
    await asyncio.sleep(0)
    assert not await answers(executor, timeout_s=0.2)
    await halting
    assert await answers(executor)
    assert executor.pid == pid


async def test_a_halted_service_can_be_killed(executor: SupervisedService) -> None:
    pid = executor.pid
    await executor.halt(0.0, then_kill=True)
    await asyncio.wait_for(executor.ready.wait(), TIMEOUT_S)
    assert executor.pid != pid
    assert executor.num_unexpected_exits == 0


async def test_a_service_that_does_not_start_says_so(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        service = SupervisedService("executor_svc", ["--no-such-flag"], tmp_path, log)
        with pytest.raises(ChildExitedError, match="executor_svc exited with status 2"):
            await service.start()
        await service.stop()
    assert "no-such-flag" in (tmp_path / "log").read_text()


def test_usage_counts_open_files() -> None:
    before = usage_of(os.getpid())
    with Path(__file__).open():
        during = usage_of(os.getpid())
    assert during.num_fds == before.num_fds + 1
    assert before.rss_mib > 10
    assert before.num_threads >= 1
