"""What is kept running, with modules that take no time to start."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from everystop.child import ChildExitedError
from everystop.supervision import MAX_FAILED_STARTS, Service, SupervisedProcess

TIMEOUT_S = 30.0

LISTENER = """
import pathlib, signal, sys
flags = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
lives = pathlib.Path(flags["lives"])
lives.write_text(lives.read_text() + "x" if lives.exists() else "x")
if len(lives.read_text()) > int(flags["good-lives"]):
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path(flags["address-file"]).write_text(flags["listen"])
while True:
    signal.pause()
"""

Supervise = Callable[..., SupervisedProcess]


@pytest.fixture
async def supervise(tmp_path: Path) -> AsyncIterator[Supervise]:
    """Makes services that run `LISTENER`."""
    (tmp_path / "listener.py").write_text(LISTENER)
    made: list[SupervisedProcess] = []

    def make(*, good_lives: int = 1000, hung_after_s: float | None = None, ends: bool = False) -> SupervisedProcess:
        service = Service(
            name="listener",
            module="listener",
            flags=[f"--lives={tmp_path / 'lives'}", f"--good-lives={good_lives}"],
            listen="127.0.0.1:1",
            address_file=tmp_path / "address",
            environment={**os.environ, "PYTHONPATH": str(tmp_path)},
            max_restart_delay_s=0.0,
            hung_after_s=hung_after_s,
            ends_with_success=ends,
        )
        made.append(SupervisedProcess(service))
        return made[-1]

    yield make
    for process in made:
        process.kill_for_good()
        await process.stop(signal.SIGKILL, TIMEOUT_S)


async def back(process: SupervisedProcess, former_pid: int) -> None:
    """Wait until another process listens."""
    async with asyncio.timeout(TIMEOUT_S):
        while process.pid == former_pid or not process.ready.is_set():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_it_comes_back_whatever_it_ended_with(supervise: Supervise, number: signal.Signals) -> None:
    process = supervise()
    await process.start()
    pid = process.pid
    with capture_logs() as logs:
        os.kill(pid, number)
        await back(process, pid)
    ended, restarted = logs
    reason = "was killed by SIGKILL" if number is signal.SIGKILL else "exited with status 0"
    assert (ended["event"], ended["service"], ended["pid"], ended["reason"]) == (
        "service_ended",
        "listener",
        pid,
        reason,
    )
    assert (restarted["event"], restarted["pid"]) == ("service_restarted", process.pid)
    assert restarted["down_ms"] > 0


async def test_one_that_has_done_its_work_does_not_come_back(supervise: Supervise) -> None:
    process = supervise(ends=True)
    await process.start()
    os.kill(process.pid, signal.SIGTERM)
    with pytest.raises(ChildExitedError, match="the listener exited with status 0") as ended:
        await asyncio.wait_for(process.until(asyncio.Event().wait()), TIMEOUT_S)
    assert ended.value.returncode == 0


async def test_one_that_never_listened_is_not_tried_again(supervise: Supervise, tmp_path: Path) -> None:
    process = supervise(good_lives=0)
    with pytest.raises(ChildExitedError, match=r"the listener exited with status 3$"):
        await asyncio.wait_for(process.start(), TIMEOUT_S)
    assert (tmp_path / "lives").read_text() == "x"


async def test_one_that_can_start_no_more_is_given_up(supervise: Supervise, tmp_path: Path) -> None:
    process = supervise(good_lives=1)
    await process.start()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ChildExitedError, match=f"status 3, {MAX_FAILED_STARTS} times in a row before it listened"):
        await asyncio.wait_for(process.until(asyncio.Event().wait()), TIMEOUT_S)
    assert len((tmp_path / "lives").read_text()) == 1 + MAX_FAILED_STARTS


async def test_one_that_answers_no_health_checks_is_killed(supervise: Supervise) -> None:
    process = supervise(hung_after_s=0.2)  # it serves no gRPC at all
    await process.start()
    pid = process.pid
    with capture_logs() as logs:
        await back(process, pid)
    assert [line["event"] for line in logs] == ["service_hung", "service_ended", "service_restarted"]
    assert logs[0]["pid"] == pid


async def test_a_stop_is_the_end(supervise: Supervise, tmp_path: Path) -> None:
    process = supervise()
    await process.start()
    assert await process.stop(signal.SIGTERM, TIMEOUT_S) == 0
    assert (tmp_path / "lives").read_text() == "x"


async def test_one_that_does_not_stop_is_killed(supervise: Supervise) -> None:
    process = supervise()
    await process.start()
    os.kill(process.pid, signal.SIGSTOP)
    assert await process.stop(signal.SIGTERM, 0.1) == -signal.SIGKILL
