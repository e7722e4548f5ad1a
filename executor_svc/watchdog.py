"""Notices a step that never ends."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurrentStep:
    """What the forward thread computes at this moment."""

    step_id: int
    began_at: float
    """On the monotonic clock."""


class Watchdog:
    """The forward thread says when it begins and ends a step; the event loop waits for one that takes too long."""

    def __init__(self) -> None:
        self._current: CurrentStep | None = None

    def began(self, step_id: int) -> None:
        """A step begins; from the forward thread."""
        self._current = CurrentStep(step_id, time.monotonic())

    def ended(self) -> None:
        """It has ended, whyever; from the forward thread."""
        self._current = None

    async def wait_hung(self, limit_s: float) -> CurrentStep:
        """Return the first step that takes longer than `limit_s`, as soon as it does."""
        while True:
            step = self._current
            # A step that begins while this sleeps is looked at before it is over the limit.
            left_s = limit_s if step is None else step.began_at + limit_s - time.monotonic()
            if step is not None and left_s <= 0:
                return step
            await asyncio.sleep(left_s)
