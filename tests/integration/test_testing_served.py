"""`everystop.testing.serve_mock` and the pytest fixture, used as a user's own tests would."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time

import grpc
import pytest

from everystop.client import AsyncClient, Client
from everystop.errors import ServiceError
from everystop.options import ConfigError
from everystop.testing import MockService, serve_mock


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("everystop-mock", "forward")]


def test_it_is_ready_at_once_and_gone_afterwards() -> None:
    start = time.monotonic()
    with serve_mock() as service:
        assert time.monotonic() - start < 5.0  # far below a second on an idle machine
        with Client(service.address) as client:
            assert client.complete("Hello", max_tokens=5).usage.num_output_tokens == 5
    with Client(service.address) as client, pytest.raises(ServiceError) as refused:
        client.complete("Hello", max_tokens=5, timeout=5.0)
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert not own_threads()


def test_settings_reach_both_services() -> None:
    with (
        serve_mock(
            max_num_seqs=3, max_num_batched_tokens=9000, mock_eos_rate=1.0, num_blocks=7, block_size=4
        ) as service,
        Client(service.address) as client,
    ):
        status = client.get_status()
        assert (status.knobs.max_num_seqs, status.knobs.max_num_batched_tokens) == (3, 9000)
        assert (status.blocks.num_blocks, status.blocks.block_size) == (7, 4)
        assert client.complete("Hello", max_tokens=5).usage.num_output_tokens == 1


@pytest.mark.parametrize("name", ["no_such_setting", "listen", "backend"])
def test_a_setting_that_is_not_to_be_chosen_is_named(name: str) -> None:
    with pytest.raises(TypeError, match=name), serve_mock(**{name: "value"}):
        pass


def test_a_value_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs"), serve_mock(max_num_seqs=0):
        pass


def test_a_start_that_fails_leaves_nothing_running() -> None:
    with pytest.raises(ServiceError, match="mock_fail"), serve_mock(mock_fail="nonsense"):
        pass
    assert not own_threads()


def test_answers_go_on_where_they_were_after_the_executor_was_replaced() -> None:
    with serve_mock(mock_step_ms=2.0) as service, Client(service.address) as client:
        expected = client.complete("Once upon a time", max_tokens=60, seed=1).token_ids
        events = client.generate("Once upon a time", max_tokens=60, seed=1)
        token_ids: list[int] = []
        for event in events:
            token_ids += getattr(event, "token_ids", ())
            if len(token_ids) >= 10:
                service.stop_executor()
                service.start_executor()
                break
        for event in events:
            token_ids += getattr(event, "token_ids", ())
        assert tuple(token_ids) == expected


@pytest.mark.everystop(max_num_seqs=2)
def test_the_fixture_takes_its_settings_from_the_marker(everystop_server: MockService) -> None:
    with Client(everystop_server.address) as client:
        assert client.get_status().knobs.max_num_seqs == 2


async def test_the_fixture_serves_a_client_on_the_tests_own_loop(
    everystop_server: MockService, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncClient(everystop_server.address) as client:
        completions = await asyncio.gather(*(client.complete(f"Prompt {i}", max_tokens=20) for i in range(8)))
    assert [completion.usage.num_output_tokens for completion in completions] == [20] * 8
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_loading_the_plugin_loads_nothing_heavy() -> None:
    script = """
import sys
import everystop.testing.pytest_plugin
print(sorted(sys.modules.keys() & {"grpc", "structlog", "tokenizers", "executor_svc", "scheduler_svc", "torch"}))
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert finished.stdout.strip() == "[]"
