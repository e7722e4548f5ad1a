"""By priority, with ageing."""

from __future__ import annotations

from scheduler_svc.core.sequence import Seating, Sequence

OVERTAKEN_PER_LEVEL = 64
"""How many later arrivals may go before a request for each level that they are above it."""


class PriorityPolicy:
    """A smaller priority goes first, but only past so many that came before.

    One level is worth a lead of `OVERTAKEN_PER_LEVEL` arrivals. So nobody starves: a request of priority `p` is
    overtaken by fewer than `OVERTAKEN_PER_LEVEL * (p - q)` later arrivals, where `q` is the smallest priority in use.
    Since the lead counts arrivals, a rank never changes, and no line has to be sorted again.

    An urgent request is first in line for a place; it takes none from one that runs, unless the pool is empty.
    """

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """The arrival that a request of priority 0 would have to be, to go at the same time."""
        return (sequence.arrival_index + OVERTAKEN_PER_LEVEL * sequence.request.priority,)

    def choose_victim(self, candidates: list[Seating]) -> Seating:
        """The last in rank; only finitely many can come before the first, so it ends."""
        return candidates[-1]
