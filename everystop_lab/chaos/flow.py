"""Whether answers flow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from everystop_lab.chaos.observation import Observation


class Flow:
    """All requests that are on their way."""

    def __init__(self) -> None:
        self._running: set[Observation] = set()
        self._changed = asyncio.Event()

    @contextmanager
    def running(self, seen: Observation) -> Iterator[None]:
        """A request is on its way until the block ends."""
        self._running.add(seen)
        try:
            yield
        finally:
            self._running.remove(seen)
            self._changed.set()

    def move(self) -> None:
        """Some request got an event."""
        self._changed.set()

    async def all_moved(self, timeout_s: float) -> None:
        """Wait until each request that is on its way now has got an event or has ended, but not for ever."""
        waiting = {seen: seen.num_events for seen in self._running}
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(seen in self._running and seen.num_events == num for seen, num in waiting.items()):
                    self._changed.clear()
                    await self._changed.wait()
