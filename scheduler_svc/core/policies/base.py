"""What a policy decides."""

from __future__ import annotations

from typing import Protocol

from scheduler_svc.core.sequence import Seating, Sequence


class Policy(Protocol):
    """Who goes first and who gives way. The scheduler does the rest: a policy moves nothing and keeps no list."""

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Smaller boards first, and is served first while it runs; among equals, the earlier arrival.

        Asked whenever the sequence begins to wait, so a rank may depend on what the policy or the sequence has seen
        by then. Nobody overtakes the head of the line.
        """
        ...

    def choose_victim(self, candidates: list[Seating]) -> Seating:
        """Which of `candidates` gives its blocks back, because the pool is empty.

        They are in the order of the running, never empty: the one that asks for a block, and all that have not been
        served in this step. To keep the service live, one running sequence at a time must be safe until it ends.
        """
        ...
