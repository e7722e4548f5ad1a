"""An event loop on which waiting takes no time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class InlineThreads(ThreadPoolExecutor):
    """No threads: what goes to one is done at once."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # the future carries it
            future.set_exception(error)
        return future


class VirtualTimeSelector(selectors.DefaultSelector):
    """Waiting takes no time, it makes time pass."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        assert ready or timeout is not None, "everybody waits for ever"
        self.now += 0.0 if ready or timeout is None else max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time passes only when nobody has anything to do before then; threads are none."""

    def __init__(self) -> None:
        self._virtual = VirtualTimeSelector()
        super().__init__(self._virtual)
        self.set_default_executor(InlineThreads())

    def time(self) -> float:
        return self._virtual.now


async def turns(num_turns: int) -> None:
    """Let everybody else on the event loop have so many turns; no time passes."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
