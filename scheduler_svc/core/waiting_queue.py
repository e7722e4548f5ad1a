"""The line at the stop."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from scheduler_svc.core.sequence import Sequence

_order = attrgetter("order")


class WaitingQueue:
    """Sequences by ascending `order`, which must differ and must not change in here.

    A sorted list: thousands of pointers move in a microsecond, and unlike a heap it lets go of any member at once.
    """

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self.num_tokens = 0
        """Prompts and answers so far of all that wait."""

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def head(self) -> Sequence:
        """The one that boards next; the queue must not be empty."""
        return self._sequences[0]

    def push(self, sequence: Sequence) -> None:
        """Take its place by `order`."""
        insort(self._sequences, sequence, key=_order)
        self.num_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        """Leave the line."""
        index = bisect_left(self._sequences, sequence.order, key=_order)
        assert self._sequences[index] is sequence
        del self._sequences[index]
        self.num_tokens -= len(sequence.token_ids)

    def check_integrity(self) -> None:
        """Assert that the line is in order."""
        orders = [sequence.order for sequence in self._sequences]
        assert orders == sorted(set(orders)), "the waiting line is out of order"
        assert self.num_tokens == sum(len(sequence.token_ids) for sequence in self._sequences)
