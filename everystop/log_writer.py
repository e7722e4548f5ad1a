"""Writes log lines in a thread of its own, so that no disk and no reader of a pipe holds up or ends who logs them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import TextIO

MAX_WAITING_LINES = 10_000
"""Lines that wait for a slow reader; later ones are dropped and counted."""


class LogWriter:
    """What logging needs of a text file: `write` takes one whole line, and neither waits nor raises.

    `on_recovery` is called in the writer's thread with the number of lines that were lost, once one gets through again.
    """

    def __init__(self, file: TextIO | None, on_recovery: Callable[[int], None]) -> None:
        """`file` None, as `sys.stderr` is in a process without one, takes everything and writes nothing."""
        self._write_line = _line_writer(file)
        self._on_recovery = on_recovery
        # Not a Queue: that has a lock, and a finalizer that logs may run in the middle of a put.
        self._entries: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._num_dropped = 0
        self._counting = threading.RLock()
        # A daemon: it may be blocked for ever when the process ends.
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue a line, or drop it when too many wait."""
        if self._entries.qsize() < MAX_WAITING_LINES:
            self._entries.put(line)
        else:
            self._count_dropped()

    def flush(self) -> None:
        """Do nothing: logging flushes after every line, and nobody waits for that. See `wait_written`."""

    def wait_written(self, timeout_s: float) -> bool:
        """Wait until what was queued so far is written, or lost; False when that takes too long."""
        done = threading.Event()
        self._entries.put(done)
        return done.wait(timeout_s)

    def _run(self) -> None:
        while True:
            entry = self._entries.get()
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            try:
                self._write_line(entry)
            except (OSError, ValueError):  # a full disk, a pipe without a reader; a closed file
                self._count_dropped()
                continue
            with self._counting:
                num_dropped, self._num_dropped = self._num_dropped, 0
            if num_dropped:
                self._on_recovery(num_dropped)

    def _count_dropped(self) -> None:
        with self._counting:
            self._num_dropped += 1


def _line_writer(file: TextIO | None) -> Callable[[str], object]:
    if file is None:
        return lambda _line: None
    try:
        # Past the file's buffer: its lock, held by a thread that is blocked, would abort the process at its end. And a
        # copy, because the number may come to mean another file when somebody closes this one.
        descriptor = os.dup(file.fileno())
    except OSError:  # a file in memory only

        def write_text(line: str) -> None:
            file.write(line)
            file.flush()

        return write_text

    def write_bytes(line: str) -> None:
        rest = memoryview(line.encode(errors="backslashreplace"))
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    return write_bytes
