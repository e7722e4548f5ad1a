"""Gives the streams their turn: a few at a time, so that delivering to hundreds of clients never holds the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from scheduler_svc.stream import RequestStream

STREAMS_PER_TURN = 8


class DeliveryPump:
    """Streams that have something new wait here in order; one that gets more while it waits keeps its place."""

    def __init__(self, digest: Callable[[RequestStream], None]) -> None:
        self._digest = digest
        self._due: dict[RequestStream, None] = {}  # an ordered set
        self._any_due = asyncio.Event()

    def mark(self, stream: RequestStream) -> None:
        """`stream` was fed."""
        self._due[stream] = None
        self._any_due.set()

    async def run(self) -> None:
        """Digest what is due, for ever; between two turns everything else on the event loop gets its own."""
        while True:
            await self._any_due.wait()
            self._take_turn()
            if not self._due:
                self._any_due.clear()
            await asyncio.sleep(0)

    def _take_turn(self) -> None:
        for _ in range(min(STREAMS_PER_TURN, len(self._due))):
            stream = next(iter(self._due))
            del self._due[stream]
            self._digest(stream)
