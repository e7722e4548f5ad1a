"""A log that can't be written takes nothing from the service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from everystop.client import Client
from everystop.supervision import free_port


@contextmanager
def full_disk() -> Iterator[int]:
    with Path("/dev/full").open("w") as file:
        yield file.fileno()


@contextmanager
def unread_pipe() -> Iterator[int]:
    """One that is full, so that the first line already finds no room."""
    reader, end = os.pipe()
    os.set_blocking(end, False)
    while True:
        try:
            os.write(end, b"\n" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(end, True)
    yield end
    os.close(reader)
    os.close(end)


@contextmanager
def broken_pipe() -> Iterator[int]:
    reader, end = os.pipe()
    os.close(reader)
    yield end
    os.close(end)


def start(stack: ExitStack, module: str, stderr: int, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, "--log-level=debug", *flags]
    process = stack.enter_context(subprocess.Popen(command, stderr=stderr))
    stack.callback(process.kill)
    return process


@pytest.mark.parametrize("open_stderr", [full_disk, unread_pipe, broken_pipe])
def test_requests_go_on_though_no_log_line_can_be_written(
    open_stderr: Callable[[], AbstractContextManager[int]],
) -> None:
    address, executor_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with ExitStack() as stack:
        stderr = stack.enter_context(open_stderr())
        executor = start(stack, "executor_svc", stderr, "--backend=mock", f"--listen={executor_address}")
        scheduler = start(
            stack, "scheduler_svc", stderr, f"--listen={address}", f"--executor-address={executor_address}"
        )
        client = stack.enter_context(Client(address))
        for number in range(20):
            prompt = f"number {number}"
            assert len(client.complete(prompt, max_tokens=5, ignore_eos=True).token_ids) == 5
        for process in (scheduler, executor):
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def test_an_executor_that_hangs_ends_though_nobody_reads_where() -> None:
    address, executor_address = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with ExitStack() as stack:
        stderr = stack.enter_context(unread_pipe())
        hang = ("--backend=mock", "--mock-fail=hang@1", "--step-timeout-s=0.3")
        executor = start(stack, "executor_svc", stderr, *hang, f"--listen={executor_address}")
        start(stack, "scheduler_svc", stderr, f"--listen={address}", f"--executor-address={executor_address}")
        client = stack.enter_context(Client(address))
        events = client.generate("hello")
        next(events)
        assert executor.wait(30) == -signal.SIGALRM
        events.close()
