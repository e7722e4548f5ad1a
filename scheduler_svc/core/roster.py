"""Every request that has not ended, and where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.errors import DuplicateRequestError
from scheduler_svc.core.occupancy import Occupancy
from scheduler_svc.core.policies import Policy
from scheduler_svc.core.request import Request
from scheduler_svc.core.sequence import Seating, Sequence
from scheduler_svc.core.waiting_queue import WaitingQueue


@dataclass(slots=True)
class Counters:
    """Since the scheduler was made."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    """Of requests that were seated, each counted once."""
    num_output_tokens: int = 0
    """Delivered."""
    num_recomputed_tokens: int = 0
    """Computed for nothing because of a preemption or a lost executor."""


class Roster:
    """Moves requests between their places, and knows the order in which they go.

    add -> waiting -- board --> running -- retire --> gone from its seat, results on the way
              ^                    |                           |
              +----- preempt ------+                           |
              +--- a new executor ---- (running and retired) --+      end: from anywhere
    """

    def __init__(self, config: CoreConfig, policy: Policy) -> None:
        self.policy = policy
        self.counters = Counters()
        self.occupancy = Occupancy(config)
        self.waiting = WaitingQueue()
        self._requests: dict[str, Sequence] = {}
        self._num_arrivals = 0

    @property
    def requests(self) -> Mapping[str, Sequence]:
        """By id; a view, to be read only."""
        return MappingProxyType(self._requests)

    @property
    def running(self) -> list[Seating]:
        """Those that have a seat, in the policy's order. A new list: they may leave while it is walked through."""
        return list(self.occupancy.running)

    def add(self, request: Request, now: float) -> None:
        """Put a new request in line. Raises DuplicateRequestError while another with its id has not ended."""
        if request.request_id in self._requests:
            raise DuplicateRequestError(request.request_id)
        sequence = Sequence(request, arrival_index=self._num_arrivals, arrival_time=now)
        self._num_arrivals += 1
        self._requests[request.request_id] = sequence
        self._wait(sequence)

    def board(self, sequence: Sequence, now: float) -> Seating | None:
        """From the line to a free seat; None when there are not enough free blocks."""
        seating = self.occupancy.board(sequence, now)
        if seating is None:
            return None
        self.waiting.remove(sequence)
        if seating.attempt == 1:
            self.counters.num_prompt_tokens += len(sequence.request.prompt_token_ids)
        return seating

    def retire(self, seating: Seating) -> None:
        """Free the seat and blocks of a sequence whose last token is scheduled; it ends when that has arrived."""
        self.occupancy.leave(seating)

    def preempt(self, seating: Seating) -> None:
        """By recompute: its seat and all its blocks are free, and it waits for both again."""
        self.occupancy.leave(seating)
        seating.sequence.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._wait_again(seating)

    def move_to(self, config: CoreConfig) -> None:
        """Leave the executor for an empty one: all that have a seating wait again."""
        self.occupancy = Occupancy(config)
        for sequence in self._requests.values():
            if sequence.seating is not None:
                self._wait_again(sequence.seating)

    def end(self, sequence: Sequence) -> None:
        """Forget a request, wherever it is; its id, seat and blocks are free."""
        seating = sequence.seating
        if seating is None:
            self.waiting.remove(sequence)
        else:
            if seating.is_seated:
                self.occupancy.leave(seating)
            sequence.seating = None
        del self._requests[sequence.request.request_id]

    def _wait(self, sequence: Sequence) -> None:
        sequence.order = (*self.policy.rank(sequence), sequence.arrival_index)
        self.waiting.push(sequence)

    def _wait_again(self, seating: Seating) -> None:
        """Drop an attempt that did not bring its sequence to its end."""
        seating.sequence.drop_seating()
        self.counters.num_recomputed_tokens += seating.num_computed_tokens
        self._wait(seating.sequence)

    def check_integrity(self) -> None:
        """Assert that every request is in one place, and so are every seat and block."""
        seatings = [sequence.seating for sequence in self._requests.values()]
        assert {seating for seating in seatings if seating and seating.is_seated} == set(self.occupancy.running)
        assert set(self.waiting) == {s for s in self._requests.values() if s.seating is None}
        self.waiting.check_integrity()
        self.occupancy.check_integrity()
