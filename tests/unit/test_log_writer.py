"""Log lines go out in the background; what can't be written is dropped and counted."""

import os
import queue
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from everystop.log_writer import MAX_WAITING_LINES, LogWriter

_LOG_AND_END = """
import structlog
from everystop import log
log.configure("json", "info")
for number in range(3):
    structlog.get_logger().info("hello", number=number)
"""


def no_loss(num_lines: int) -> None:
    raise AssertionError(f"{num_lines} lines were lost")


def test_lines_are_written_in_order(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        writer = LogWriter(file, no_loss)
        for number in range(100):
            writer.write(f"{number} é \ud800\n")
        assert writer.wait_written(10)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [f"{number} é \\ud800" for number in range(100)]


def test_a_line_for_a_full_disk_is_dropped() -> None:
    with Path("/dev/full").open("w") as file:
        writer = LogWriter(file, no_loss)  # it is never told: no line gets through
        writer.write("a\n")
        writer.write("b\n")
        assert writer.wait_written(10)


def full_pipe() -> tuple[int, int, int]:
    """Its reader, its end for writing, and how many bytes it holds."""
    reader, end = os.pipe()
    num_bytes = 0
    os.set_blocking(end, False)
    for size in (4096, 1):
        with suppress(BlockingIOError):
            while True:
                num_bytes += os.write(end, b" " * size)
    os.set_blocking(end, True)
    return reader, end, num_bytes


def test_a_pipe_that_nobody_reads_holds_nobody_up_and_what_was_lost_is_counted() -> None:
    reader, end, num_bytes = full_pipe()
    losses: queue.SimpleQueue[int] = queue.SimpleQueue()
    with os.fdopen(reader, "rb") as pipe, os.fdopen(end, "w") as file:
        writer = LogWriter(file, losses.put)
        for number in range(2 * MAX_WAITING_LINES):
            writer.write(f"{number}\n")
        assert not writer.wait_written(0.0)
        assert losses.empty()
        pipe.read(num_bytes)
        num_lost = losses.get(timeout=10)
        assert num_lost > MAX_WAITING_LINES // 2
        numbers = [int(pipe.readline()) for _ in range(2 * MAX_WAITING_LINES - num_lost)]
        assert numbers == sorted(set(numbers))
        assert writer.wait_written(10)
        assert losses.empty()


def test_a_process_without_stderr_logs_nothing() -> None:
    writer = LogWriter(None, no_loss)
    writer.write("a\n")
    assert writer.wait_written(10)


def test_the_last_lines_of_a_process_are_written() -> None:
    ended = subprocess.run([sys.executable, "-c", _LOG_AND_END], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.count("hello")) == (0, 3)


def test_a_process_whose_log_is_blocked_ends_well() -> None:
    reader, end, _ = full_pipe()
    ended = subprocess.run([sys.executable, "-c", _LOG_AND_END], stderr=end, timeout=60)
    assert ended.returncode == 0
    os.close(reader)
    os.close(end)
