"""What the steps were like, for `GetStatus`, the metrics and the bench."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from everystop.histogram import Histogram
from everystop.plan import StepTimings

WINDOW_STEPS = 512

_NUM_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_NUM_BYTES = tuple(2**exponent for exponent in range(4, 24))


class _Window:
    """The sum of the last `WINDOW_STEPS` values."""

    __slots__ = ("_values", "total")

    def __init__(self) -> None:
        self.total = 0
        self._values: deque[int] = deque(maxlen=WINDOW_STEPS)

    def push(self, value: int) -> None:
        oldest = self._values[0] if len(self._values) == WINDOW_STEPS else 0
        self._values.append(value)
        self.total += value - oldest


@dataclass(slots=True)
class StepStats:
    """Sums over all steps, and a window of the last `WINDOW_STEPS`."""

    num_steps: int = 0
    num_plan_bytes: int = 0
    num_connections: int = 0
    busy_us: int = 0
    """The executor computed."""
    exposed_us: int = 0
    """The executor waited for a plan although there was work: scheduling that the forward did not hide."""
    step_tokens: Histogram = field(default_factory=lambda: Histogram(_NUM_TOKENS))
    """Tokens computed in each step."""
    plan_bytes: Histogram = field(default_factory=lambda: Histogram(_NUM_BYTES))
    _plan_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _busy_us: _Window = field(default_factory=_Window)
    _exposed_us: _Window = field(default_factory=_Window)

    def sent(self, *, num_bytes: int, num_tokens: int) -> None:
        """Count a plan of `num_bytes` for `num_tokens` to compute."""
        self.num_plan_bytes += num_bytes
        self._plan_bytes.append(num_bytes)
        self.plan_bytes.observe(num_bytes)
        self.step_tokens.observe(num_tokens)

    def received(self, timings: StepTimings, *, had_work: bool) -> None:
        """Count a result. What the executor waited is exposed only if there was work all along (`had_work`)."""
        self.num_steps += 1
        busy_us, exposed_us = timings.forward_us + timings.sample_us, timings.waited_us if had_work else 0
        self.busy_us += busy_us
        self.exposed_us += exposed_us
        self._busy_us.push(busy_us)
        self._exposed_us.push(exposed_us)

    @property
    def plan_bytes_p50(self) -> int:
        """Median size of a plan in bytes."""
        return int(statistics.median(self._plan_bytes)) if self._plan_bytes else 0

    @property
    def executor_idle_share(self) -> float:
        """Share of the executor's time, from 0 to 1, that it waited for a plan although there was work."""
        total_us = self._busy_us.total + self._exposed_us.total
        return self._exposed_us.total / total_us if total_us else 0.0
