"""`everystop chaos` with the mock: that it finds nothing, and that it would find something."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from everystop.testing import serve_mock
from everystop_lab.chaos import chaos, run
from everystop_lab.chaos.items import Item

SMALL = ("--items=6", "--streams=6", "--max-prompt-tokens=60", "--max-tokens=40", "--json")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(chaos, arguments)


def figures(result: Result) -> dict[str, Any]:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.timeout(180)
def test_nothing_is_lost() -> None:
    flags = ["--minutes=0.4", "--kills=5", "--stops=2", "--items=24", "--seed=11", "--json"]
    finished = subprocess.run(
        [sys.executable, "-m", "everystop", "chaos", *flags], capture_output=True, text=True, check=False, timeout=170
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads(finished.stdout)
    assert (found["lost"], found["wrong_tokens"], found["leaked_blocks"], found["leaked_requests"]) == (0, 0, 0, 0)
    assert found["scheduler_kills"] == 5
    assert found["executor_kills"] >= 5
    assert found["executor_stops"] == 2
    assert found["unexpected_exits"] == 0
    ended = ("completed", "cancelled", "deadline_exceeded", "vanished")
    assert found["requests"] == sum(found[name] for name in ended)
    assert min(found[name] for name in ended) > 0
    assert found["max_pause_ms"] > 0


def test_a_deployment_is_hurt_through_its_commands(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    with serve_mock() as service:
        result = invoke(
            *(f"--address={service.address}", "--minutes=0.05", "--kills=3", *SMALL),
            *(f"--kill-executor=echo executor >> {calls}", f"--kill-scheduler=echo scheduler >> {calls}"),
        )
    assert result.exit_code == 0, result.output
    assert sorted(calls.read_text().split()) == ["executor"] * 3 + ["scheduler"] * 3
    found = figures(result)
    assert (found["executor_kills"], found["scheduler_kills"], found["executor_stops"]) == (3, 3, 0)


def test_a_command_that_fails_ends_the_run() -> None:
    with serve_mock() as service:
        result = invoke(
            *(f"--address={service.address}", "--minutes=0.05", "--kills=1", *SMALL),
            *("--kill-executor=exit 3", "--kill-scheduler=true"),
        )
    assert result.exit_code == 1
    assert "'exit 3' ended with status 3" in result.output


def test_own_services_that_do_not_start_say_why() -> None:
    flags = ["--executor=cpu", "--model=/nowhere", "--json"]
    finished = subprocess.run(
        [sys.executable, "-m", "everystop", "chaos", *flags], capture_output=True, text=True, check=False, timeout=60
    )
    assert finished.returncode == 1
    assert "executor_svc exited with status 1" in finished.stderr
    assert "/nowhere" in finished.stderr


def test_kills_need_commands() -> None:
    result = invoke("--address=127.0.0.1:1", *SMALL)
    assert result.exit_code == 2
    assert "--kill-executor" in result.output


def test_a_request_that_fails_is_lost() -> None:
    failures = ",".join(f"sequence@{step}" for step in range(700, 1000, 10))
    with serve_mock(mock_fail=failures) as service:
        result = invoke(f"--address={service.address}", "--minutes=0.1", "--kills=0", *SMALL)
    assert result.exit_code == 1
    assert figures(result)["lost"] > 0
    assert "EXECUTION_FAILED" in result.stderr


def test_an_answer_that_differs_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = run.undisturbed

    async def with_one_other_token(*arguments: Any) -> list[Item]:
        items = await undisturbed(*arguments)
        token_ids = items[0].answer.token_ids
        answer = dataclasses.replace(items[0].answer, token_ids=(*token_ids[:-1], token_ids[-1] ^ 1))
        return [dataclasses.replace(items[0], answer=answer), *items[1:]]

    monkeypatch.setattr(run, "undisturbed", with_one_other_token)
    with serve_mock() as service:
        result = invoke(f"--address={service.address}", "--minutes=0.05", "--kills=0", *SMALL)
    assert result.exit_code == 1
    found = figures(result)
    assert 0 < found["wrong_tokens"] < found["requests"]
    assert found["lost"] == 0
    assert "tokens differ from number" in result.stderr


def test_a_service_that_answers_nobody_is_said_so() -> None:
    result = invoke("--address=127.0.0.1:1", "--kills=0", "--patience-s=1", *SMALL)
    assert result.exit_code == 1
    assert "UNAVAILABLE" in result.output
