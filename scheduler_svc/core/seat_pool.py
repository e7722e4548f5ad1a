"""Which of the executor's slots are taken."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class SeatPool:
    """Slots from 0 to `num_seats - 1`, the lowest free one first, and the exits that no plan has named yet."""

    def __init__(self, num_seats: int) -> None:
        self._num_seats = num_seats
        self._free_slots = list(range(num_seats))
        self._exit_slots: list[int] = []

    @property
    def num_free_seats(self) -> int:
        """Slots that can be taken now."""
        return len(self._free_slots)

    def take(self) -> int:
        """The lowest free slot, which there must be."""
        return heapq.heappop(self._free_slots)

    def leave(self, slot: int) -> None:
        """Free a slot. It can be taken again at once: a plan's exits come before its admissions."""
        heapq.heappush(self._free_slots, slot)
        self._exit_slots.append(slot)

    def take_exit_slots(self) -> list[int]:
        """The slots that were left since the last call, for the next plan to name."""
        exit_slots, self._exit_slots = self._exit_slots, []
        return exit_slots

    def check_integrity(self, taken_slots: Iterable[int]) -> None:
        """Assert that each slot is either free or one of `taken_slots`."""
        assert sorted([*self._free_slots, *taken_slots]) == list(range(self._num_seats)), (
            "a slot is lost or in two places"
        )
        assert len(set(self._exit_slots)) == len(self._exit_slots), "a slot exits twice"
