"""When the doors are open: at every stop, or only when the bus is empty."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol

from scheduler_svc.core.sequence import Sequence


class Batching(Protocol):
    """Whether the head of the line may board now; seats, blocks and budget are the scheduler's business."""

    def begin_boarding(self, waiting: Iterable[Sequence], num_running: int) -> None:
        """Called once in each step that can board, before the first `may_board`."""
        ...

    def may_board(self, sequence: Sequence) -> bool:
        """Whether `sequence`, now the head of the line, may take a seat."""
        ...

    def on_out_of_blocks(self) -> None:
        """Called when a sequence that may board has to wait for blocks."""
        ...


class ContinuousBatching:
    """Everybody may board at every step."""

    def begin_boarding(self, waiting: Iterable[Sequence], num_running: int) -> None:
        """Nothing to prepare."""

    def may_board(self, sequence: Sequence) -> bool:
        """Always."""
        return True

    def on_out_of_blocks(self) -> None:
        """Nothing changes."""


class StaticBatching:
    """A batch is what waits when no sequence is seated; the next one boards after its longest member has left.

    Who belongs to it is settled at its first step, but its members board over as many steps as the token budget needs:
    closing the doors after the first plan would make a batch as small as one step's budget of prompt tokens, and the
    comparison with continuous batching unfair. The first member that lacks blocks closes the batch behind those that
    have boarded; otherwise it would board when another ends, which is what static batching does not do. Preempted
    members may come back.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._members: set[Sequence] = set()

    def begin_boarding(self, waiting: Iterable[Sequence], num_running: int) -> None:
        """Form a new batch if the last one has left."""
        if num_running == 0:
            self._members = set(islice(waiting, self._max_num_seqs))

    def may_board(self, sequence: Sequence) -> bool:
        """Whether it belongs to the batch."""
        return sequence in self._members

    def on_out_of_blocks(self) -> None:
        """Keep those alone that have boarded at least once."""
        self._members = {sequence for sequence in self._members if sequence.num_seatings > 0}


# By name, given max_num_seqs.
BATCHINGS: dict[str, Callable[[int], Batching]] = {
    "continuous": lambda _max_num_seqs: ContinuousBatching(),
    "static": StaticBatching,
}
