"""How long to wait before the next try."""

from __future__ import annotations

import random

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 2.0


class Backoff:
    """Twice as long after each try that came to nothing, up to a limit; with jitter, so that two never try in step."""

    def __init__(self, max_delay_s: float = MAX_DELAY_S) -> None:
        """`max_delay_s` is the limit before jitter; with 0 there is no wait at all."""
        self._max_delay_s = max_delay_s
        self._first_delay_s = self._delay_s = min(FIRST_DELAY_S, max_delay_s)

    def next_delay_s(self, *, was_useful: bool) -> float:
        """Seconds to wait now. `was_useful`: the last try led to something, so this begins anew."""
        if was_useful:
            self._delay_s = self._first_delay_s
        delay_s, self._delay_s = self._delay_s, min(2 * self._delay_s, self._max_delay_s)
        return delay_s * random.uniform(0.5, 1.5)
