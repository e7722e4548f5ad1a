"""Work on texts, such as tokenizing: a short one is done at once, a long one off the event loop, few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc

from everystop.errors import Reason, ServiceError
from scheduler_svc import limits

LONG_TEXT = 2048
"""Characters or tokens from which on it goes to a thread; a shorter text costs less than the way there and back."""

NUM_THREADS = 2
"""Part of the work is Python, for which all threads take turns with the event loop: more of them only slow that."""

MAX_PENDING_LENGTH = 4 * limits.MAX_TEXT_LENGTH
"""Characters and tokens that may wait for the threads; it takes them seconds."""

_Result = TypeVar("_Result")


class TextWork:
    """The threads, and the line in front of them."""

    def __init__(self) -> None:
        self.pending_length = 0
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")

    async def do(self, length: int, work: Callable[[], _Result]) -> _Result:
        """Do `work` on a text of so many characters or tokens. Raises ServiceError QUEUE_FULL, and what `work` does."""
        if length < LONG_TEXT:
            return work()
        if self.pending_length and self.pending_length + length > MAX_PENDING_LENGTH:
            message = f"texts of {self.pending_length} characters are being read, at most {MAX_PENDING_LENGTH} may"
            raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL, message, retry_after_s=1.0)
        self.pending_length += length
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self.pending_length -= length


TEXT_WORK = TextWork()
"""Of this process: what it protects is the interpreter, and there is one."""
