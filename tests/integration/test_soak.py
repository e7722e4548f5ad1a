"""Many requests, and nothing of them is left. `everystop soak` sends 50,000 by default."""

import asyncio
import gc
import json
import random
import subprocess
import sys
from typing import Any

import pytest

import executor_svc.server
import scheduler_svc.server
from everystop.client import AsyncClient
from everystop.settings import ExecutorConfig, SchedulerConfig
from everystop_lab.settling import settled
from everystop_lab.soak import Load, is_clean
from executor_svc.mock import MockBackend


def figures(*arguments: str) -> dict[str, Any]:
    """What a command prints."""
    command = [sys.executable, "-m", "everystop", *arguments, "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=230)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.timeout(240)
def test_memory_is_flat_and_nothing_is_left() -> None:
    found = figures("soak", "--requests=3000", "--max-growth=1.15")
    assert found["requests"] == found["finished"] + found["cancelled"] == 3000
    assert 450 < found["cancelled"] < 750
    assert [value for name, value in found.items() if name.startswith("left_")] == [0] * 5
    assert found["output_tokens"] > found["finished"]
    assert found["scheduler_mib_after_warm_up"] > 10


GOOD = {"left_blocks": 0, "left_streams": 0, "scheduler_growth": 1.05, "executor_growth": 0.99, "exit_status": 0}


@pytest.mark.parametrize(
    ("change", "is_good"),
    [
        ({}, True),
        ({"left_blocks": 1}, False),
        ({"left_streams": 1}, False),
        ({"scheduler_growth": 1.2}, False),
        ({"executor_growth": 1.2}, False),
        ({"exit_status": -9}, False),
    ],
)
def test_whatever_is_left_is_told(change: dict[str, float], is_good: bool) -> None:
    assert is_clean(GOOD | change, max_growth=1.1) is is_good


async def test_no_task_is_left() -> None:
    executor_config = ExecutorConfig(listen="127.0.0.1:0", backend="mock", mock_step_ms=0.0)
    executor = await executor_svc.server.start(executor_config, MockBackend(executor_config))
    scheduler = await scheduler_svc.server.start(
        SchedulerConfig(listen="127.0.0.1:0", executor_address=executor.address)
    )
    load = Load(random.Random(0), num_streams=32, cancel_share=0.5)
    async with AsyncClient(scheduler.address) as client:
        await settled(client, patience_s=30.0)
        await load.send(client, 50)
        await settled(client, patience_s=30.0)
        before = _task_names()
        await load.send(client, 500)
        await settled(client, patience_s=30.0)
        async with asyncio.timeout(30):
            while _task_names() != before:  # a call that is over may take some turns of the loop to be gone
                await asyncio.sleep(0)
    assert load.tally.cancelled > 200
    assert scheduler.loop.desk.num_requests == 0
    await scheduler.stop()
    await executor.stop()
    del scheduler, executor
    gc.collect()  # gRPC's servers shut down once more when they are collected, and need the loop for it
    await asyncio.sleep(0)


def _task_names() -> list[str]:
    """Of what runs, without the numbers that make each unique."""
    return sorted(task.get_coro().__qualname__ for task in asyncio.all_tasks())


@pytest.mark.timeout(120)
def test_ten_times_the_load_is_refused_and_the_rest_is_as_fast() -> None:
    found = figures("bench", "overload", "--seconds=4", "--step-ms=8", "--seqs=8", "--waiting=4")
    assert found["streams_at_many"] == 10 * found["streams_at_one"]
    assert found["refused_at_many"] > 100
    assert found["served_ratio"] > 0.5
    assert found["latency_ratio"] < 3
    assert found["scheduler_growth"] < 1.1
    assert found["executor_growth"] < 1.1
