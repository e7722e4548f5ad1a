"""The scheduler as a process of its own: how it ends, and what it does without a place for its log."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from services import check_exact, process

from everystop.channel import client_channel
from everystop.client import AsyncClient, Client, Delta
from everystop.errors import Reason, ServiceError, from_rpc_error
from everystop.scheduler.v1 import admin_pb2, admin_pb2_grpc
from scheduler_svc.lifecycle import ADMIN_SERVICE, INFERENCE_SERVICE

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING
LONG = 100_000


@pytest.fixture(scope="module")
def executor_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with process("executor_svc", tmp_path_factory.mktemp("executor"), "--backend=mock", "--mock-step-ms=2") as started:
        yield started[1]


Scheduler = tuple[subprocess.Popen[str], str]


@pytest.fixture
def scheduler(executor_address: str, tmp_path: Path) -> Iterator[Scheduler]:
    """A scheduler that serves, with three seconds of grace."""
    flags = (f"--executor-address={executor_address}", "--drain-grace-s=3")
    with process("scheduler_svc", tmp_path, *flags) as (started, address):
        wait_until_served(address)
        yield started, address


def wait_until_served(address: str) -> None:
    with Client(address) as client:
        while client.get_status().state != admin_pb2.SCHEDULER_STATE_SERVING:
            pass


async def refused(client: AsyncClient) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await client.complete("one more", max_tokens=1)
    return caught.value


async def health(address: str, service: str) -> int:
    async with client_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        return (await check(health_pb2.HealthCheckRequest(service=service))).status


async def until_draining(client: AsyncClient) -> None:
    while (await client.get_status()).state != admin_pb2.SCHEDULER_STATE_DRAINING:
        pass


async def begin_endless(client: AsyncClient) -> asyncio.Task[None]:
    """A stream that would go on for minutes, once its first token is there."""
    begun = asyncio.Event()

    async def read() -> None:
        async for event in client.generate("endless", max_tokens=LONG):
            if isinstance(event, Delta):
                begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    return task


async def check_cut_off(stream: asyncio.Task[None], message: str) -> None:
    with pytest.raises(ServiceError, match=message) as caught:
        await stream
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.DRAINING)


async def test_sigterm_finishes_what_runs_and_takes_nothing_new(scheduler: Scheduler) -> None:
    process, address = scheduler
    async with AsyncClient(address, retry=None) as client:
        async with asyncio.TaskGroup() as streams:
            for index in range(4):
                streams.create_task(check_exact(client, index, max_tokens=300))
            while (await client.get_status()).num_running < 4:
                pass
            process.send_signal(signal.SIGTERM)
            await until_draining(client)
            error = await refused(client)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.DRAINING)
            assert await health(address, INFERENCE_SERVICE) == NOT_SERVING
            assert (await health(address, ADMIN_SERVICE), await health(address, "")) == (SERVING, SERVING)
        assert await asyncio.to_thread(process.wait, 10) == 0


async def test_the_grace_period_ends_what_still_runs(executor_address: str, tmp_path: Path) -> None:
    flags = (f"--executor-address={executor_address}", "--drain-grace-s=0.5")
    with process("scheduler_svc", tmp_path, *flags) as (started, address):
        wait_until_served(address)
        async with AsyncClient(address, retry=None) as client:
            stream = await begin_endless(client)
            started.send_signal(signal.SIGTERM)
            await check_cut_off(stream, "grace period of 0.5 s is over")
        assert await asyncio.to_thread(started.wait, 10) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_does_not_wait(scheduler: Scheduler, second: signal.Signals) -> None:
    process, address = scheduler
    async with AsyncClient(address, retry=None) as client:
        stream = await begin_endless(client)
        process.send_signal(signal.SIGTERM)
        await until_draining(client)
        asked_at = asyncio.get_running_loop().time()
        process.send_signal(second)
        await check_cut_off(stream, "shutting down")
        assert await asyncio.to_thread(process.wait, 10) == 0
        assert asyncio.get_running_loop().time() - asked_at < 2.5


async def test_a_scheduler_without_requests_drains_at_once(scheduler: Scheduler) -> None:
    process, _ = scheduler
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 2.5) == 0


async def test_drain_by_call_answers_at_once_and_then_ends_the_process(scheduler: Scheduler) -> None:
    process, address = scheduler
    async with AsyncClient(address, retry=None) as client, client_channel(address) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        stream = await begin_endless(client)
        for grace_s in (-1.0, float("nan"), float("inf")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin.Drain(admin_pb2.DrainRequest(grace_s=grace_s))
            assert from_rpc_error(caught.value).field == "grace_s"
        assert (await admin.Drain(admin_pb2.DrainRequest(grace_s=1000))).num_requests == 1
        assert (await refused(client)).reason is Reason.DRAINING
        assert not stream.done()
        # A second drain can only shorten the first.
        assert (await admin.Drain(admin_pb2.DrainRequest(grace_s=0))).num_requests == 1
        await check_cut_off(stream, "grace period of 0 s is over")
    assert await asyncio.to_thread(process.wait, 10) == 0


async def test_drain_by_call_has_the_grace_of_the_setting_when_none_is_given(scheduler: Scheduler) -> None:
    process, address = scheduler
    async with AsyncClient(address, retry=None) as client, client_channel(address) as channel:
        stream = await begin_endless(client)
        await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
        await check_cut_off(stream, "grace period of 3 s is over")
    assert await asyncio.to_thread(process.wait, 10) == 0


async def test_a_full_disk_for_the_logs_stops_nobody(tmp_path: Path) -> None:
    with (
        Path("/dev/full").open("w") as full,
        process("executor_svc", tmp_path, "--backend=mock", stderr=full) as (executor, executor_address),
        process("scheduler_svc", tmp_path, f"--executor-address={executor_address}", stderr=full) as (started, address),
    ):
        wait_until_served(address)
        async with AsyncClient(address, retry=None) as client:
            await asyncio.gather(*[check_exact(client, index) for index in range(4)])
            with pytest.raises(ServiceError, match=r"stop\.max_tokens"):
                await client.complete("x", max_tokens=0)
            await check_exact(client, 1)
        for service in (started, executor):
            service.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(service.wait, 10) == 0


async def test_a_log_that_nobody_reads_any_more_stops_nobody(tmp_path: Path) -> None:
    """The other end of a pipe is closed, as when a log collector dies."""
    with process("executor_svc", tmp_path, "--backend=mock") as (_, executor_address):
        flags = (f"--executor-address={executor_address}",)
        with process("scheduler_svc", tmp_path, *flags, stderr=subprocess.PIPE) as (started, address):
            assert started.stderr is not None
            started.stderr.close()
            wait_until_served(address)
            async with AsyncClient(address, retry=None) as client:
                await asyncio.gather(*[check_exact(client, index) for index in range(4)])
            started.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(started.wait, 10) == 0
