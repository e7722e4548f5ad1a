"""Both services are replaced under load, one after the other, as an operator would: nothing is lost."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from everystop.client import AsyncClient, Retry
from everystop.errors import ServiceError
from everystop_lab.own_services import OwnServices, own_services
from everystop_lab.supervised import SupervisedService

NUM_STREAMS = 8
NUM_ROUNDS = 3
TIMEOUT_S = 60.0


async def answer(client: AsyncClient, index: int) -> tuple[int, ...]:
    return (await client.complete(f"stream {index}", max_tokens=250, temperature=index % 2, seed=index)).token_ids


async def replaced(service: SupervisedService, former_pid: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while service.pid == former_pid or not service.ready.is_set():
            await asyncio.sleep(0.01)


async def replace_executor(services: OwnServices) -> None:
    pid = services.executor.pid
    os.kill(pid, signal.SIGTERM)
    await replaced(services.executor, pid)


async def replace_scheduler(services: OwnServices, client: AsyncClient, grace_s: float) -> int:
    """Returns how many requests were in."""
    pid = services.scheduler.pid
    num_requests = await client.drain(grace_s)
    await replaced(services.scheduler, pid)
    return num_requests


@pytest.mark.parametrize("grace_s", [30.0, 0.2], ids=["all finish", "the grace period is too short"])
async def test_nothing_is_lost(tmp_path: Path, grace_s: float) -> None:
    retry = Retry(max_backoff_s=0.2, max_elapsed_s=TIMEOUT_S)
    flags = ["--backend=mock", "--mock-step-ms=4"]
    with (tmp_path / "log").open("wb") as log, capture_logs() as logs:
        async with (
            own_services(flags, [], folder=tmp_path, log=log) as services,
            AsyncClient(services.address, retry=retry) as client,
        ):
            expected = await load(client, num_rounds=1)
            running = asyncio.create_task(load(client, num_rounds=NUM_ROUNDS))
            num_requests = []
            for _ in range(2):
                await busy(client)
                await replace_executor(services)
                await busy(client)
                num_requests.append(await replace_scheduler(services, client, grace_s))
            received = await asyncio.wait_for(running, TIMEOUT_S)
            status = await client.get_status()
    assert received == expected * NUM_ROUNDS
    assert min(num_requests) > 0
    assert status.blocks.num_used_blocks == 0
    ended = [(line["service"], line["reason"]) for line in logs if line["event"] == "service_ended"]
    both = [("executor_svc", "exited with status 0"), ("scheduler_svc", "exited with status 0")]
    assert ended == both * 2
    assert ("drain_cut_short" in (tmp_path / "log").read_text()) == (grace_s < 1)


async def load(client: AsyncClient, *, num_rounds: int) -> list[tuple[int, ...]]:
    """Round after round of as many answers at once."""
    received: list[tuple[int, ...]] = []
    for _ in range(num_rounds):
        received += await asyncio.gather(*(answer(client, index) for index in range(NUM_STREAMS)))
    return received


async def busy(client: AsyncClient) -> None:
    """Wait until something runs; a scheduler that has just come back may not be reached yet."""
    num_running = 0
    async with asyncio.timeout(TIMEOUT_S):
        while not num_running:
            with suppress(ServiceError):
                num_running = (await client.get_status()).num_running
            await asyncio.sleep(0.01)
