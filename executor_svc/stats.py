"""What the steps of the executor were like, for its metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from everystop.histogram import Histogram
from everystop.plan import StepTimings

_STEP_S = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


@dataclass(slots=True)
class EngineStats:
    """Sums since the process started."""

    num_sessions: int = 0
    """Schedulers that shook hands."""
    num_steps: int = 0
    num_tokens: int = 0
    """Computed."""
    num_failed_steps: int = 0
    """Steps in which the backend raised."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Plans that were not executed, by `ErrorInfo.reason`."""
    waited_us: int = 0
    """Without a plan, whether there was work or not."""
    forward_us: int = 0
    sample_us: int = 0
    step_time: Histogram = field(default_factory=lambda: Histogram(_STEP_S))
    """Seconds that a step computed."""

    def stepped(self, num_tokens: int, timings: StepTimings) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.waited_us += timings.waited_us
        self.forward_us += timings.forward_us
        self.sample_us += timings.sample_us
        self.step_time.observe((timings.forward_us + timings.sample_us) / 1e6)
