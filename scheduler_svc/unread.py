"""How long an answer may wait for its client: what is written goes out only as fast as the client reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc

from everystop.errors import Reason, ServiceError
from everystop.scheduler.v1 import inference_pb2 as pb

Write = Callable[[pb.GenerateResponse], Awaitable[None]]

_CHECKS_PER_LIMIT = 8


@asynccontextmanager
async def limited(write: Write, max_unread_s: float) -> AsyncIterator[Write]:
    """Yield `write` with a limit: when the writes in the block have waited for `max_unread_s` in all, it ends.

    All waiting counts, so a client gains nothing by taking one message now and then. That the limit is over is found up
    to an eighth of it too late. Raises ServiceError ABORTED.
    """
    watch = _Watch(write, max_unread_s)
    try:
        async with asyncio.timeout(None) as limit:
            watch.start(limit)
            try:
                yield watch.write
            finally:
                watch.stop()
    except TimeoutError as error:
        if not limit.expired():
            raise
        message = f"nothing of the answer was read for {max_unread_s:g} s in all"
        raise ServiceError(grpc.StatusCode.ABORTED, Reason.SLOW_READER, message) from error


class _Watch:
    """Adds up the waiting. It looks from time to time: a timer for each write would be a timer for each token."""

    def __init__(self, write: Write, max_unread_s: float) -> None:
        self._write = write
        self._left_s = max_unread_s
        self._pause_s = max_unread_s / _CHECKS_PER_LIMIT
        self._waits_since: float | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, limit: asyncio.Timeout) -> None:
        """Look until `stop`; end `limit` when the waiting has been too long."""
        now = self._loop.time()
        if self._waits_since is not None and now - self._waits_since >= self._left_s:
            limit.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._pause_s, self.start, limit)

    def stop(self) -> None:
        assert self._timer is not None
        self._timer.cancel()

    async def write(self, event: pb.GenerateResponse) -> None:
        self._waits_since = self._loop.time()
        try:
            await self._write(event)
        finally:
            self._left_s -= self._loop.time() - self._waits_since
            self._waits_since = None
