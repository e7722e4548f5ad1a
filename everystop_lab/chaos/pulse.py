"""A sign of life."""

from __future__ import annotations

import asyncio


class Pulse:
    """Beats whenever a client gets something."""

    def __init__(self) -> None:
        self._beaten = asyncio.Event()

    def beat(self) -> None:
        """A client has got something."""
        self._beaten.set()

    async def next(self) -> None:
        """Wait for the next beat."""
        self._beaten.clear()
        await self._beaten.wait()
