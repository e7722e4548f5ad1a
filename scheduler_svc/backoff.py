"""How long to wait before the next try to connect."""

from __future__ import annotations

import random

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 2.0


class Backoff:
    """Twice as long after each try that came to nothing, up to a limit; with jitter, so that two never try in step."""

    def __init__(self) -> None:
        self._delay_s = FIRST_DELAY_S

    def next_delay_s(self, *, was_useful: bool) -> float:
        """Seconds to wait now. `was_useful`: the last try led to something, so this begins anew."""
        if was_useful:
            self._delay_s = FIRST_DELAY_S
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, MAX_DELAY_S)
        return delay_s * random.uniform(0.5, 1.5)
