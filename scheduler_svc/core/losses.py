"""Lost executors, and who is suspected of it.

A request whose every attempt kills the executor must not take the others with it for ever, and nobody else may pay for
it. All that took part in the steps in flight at a loss are counted a loss, and cleared as soon as they get further than
they ever were. One that does not:

    1 loss      goes on like everybody; executors die of many things
    2 losses    is a suspect: boards only while no other suspect is seated, so that the next loss tells them apart
    max_losses  is given up, alone
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.sequence import Seating, Sequence
from scheduler_svc.core.step import InFlightStep

_SUSPECT_LOSSES = 2


def count_loss(steps: Iterable[InFlightStep]) -> None:
    """Count a loss for all that took part in `steps` and still wait for what they bring."""
    seatings = {seating for step in steps for seating in step.participants() if seating.is_current}
    for seating in seatings:
        seating.sequence.num_losses += 1


def may_board(sequence: Sequence, running: Iterable[Seating]) -> bool:
    """Whether a loss would still tell the suspects apart if `sequence` boarded."""
    return not _is_suspect(sequence) or not any(_is_suspect(seating.sequence) for seating in running)


def _is_suspect(sequence: Sequence) -> bool:
    return sequence.num_losses >= _SUSPECT_LOSSES
