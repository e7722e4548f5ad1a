"""First come, first served."""

from __future__ import annotations

from scheduler_svc.core.sequence import Seating, Sequence


class FcfsPolicy:
    """By arrival alone. A preempted sequence arrived before all that never boarded, so it comes back before them."""

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """All are equal, so the earlier arrival goes first."""
        return ()

    def choose_victim(self, candidates: list[Seating]) -> Seating:
        """The latest arrival; so the oldest always goes on, and every request ends."""
        return candidates[-1]
