"""What the last steps were like, for `GetStatus` and the bench."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from everystop.plan import StepTimings

WINDOW_STEPS = 512


@dataclass(slots=True)
class StepStats:
    """Sums over all steps, and a window of the last `WINDOW_STEPS`."""

    num_steps: int = 0
    num_plan_bytes: int = 0
    num_connections: int = 0
    _plan_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _busy_us: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _idle_us: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def sent(self, num_bytes: int) -> None:
        """Count a plan of `num_bytes`."""
        self.num_plan_bytes += num_bytes
        self._plan_bytes.append(num_bytes)

    def received(self, timings: StepTimings, *, had_work: bool) -> None:
        """Count a result. What the executor waited is idle time only if there was work all along (`had_work`)."""
        self.num_steps += 1
        self._busy_us.append(timings.forward_us + timings.sample_us)
        self._idle_us.append(timings.waited_us if had_work else 0)

    @property
    def plan_bytes_p50(self) -> int:
        """Median size of a plan in bytes."""
        return int(statistics.median(self._plan_bytes)) if self._plan_bytes else 0

    @property
    def executor_idle_share(self) -> float:
        """Share of the executor's time, from 0 to 1, that it waited for a plan although there was work."""
        total = sum(self._busy_us) + sum(self._idle_us)
        return sum(self._idle_us) / total if total else 0.0
