"""Counts of observations by size: as cheap to fill as it gets, for what happens at every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Observations in buckets. One thread observes; others may read, and see at most the last observation by half."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: upper bounds of the buckets, each included, ascending; what is larger has a bucket of its own."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, num_times: int = 1) -> None:
        """Count `value`, so many times."""
        self._counts[bisect_left(self._bounds, value)] += num_times
        self._total += value * num_times

    @property
    def num_observations(self) -> int:
        """How many there were."""
        return sum(self._counts)

    @property
    def total(self) -> float:
        """Their sum."""
        return self._total

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), ascending, "+Inf" at the end: a histogram as Prometheus wants it."""
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        num_up_to = 0
        pairs: list[tuple[str, float]] = []
        for bound, count in zip(bounds, self._counts.copy(), strict=True):
            num_up_to += count
            pairs.append((bound, num_up_to))
        return pairs
