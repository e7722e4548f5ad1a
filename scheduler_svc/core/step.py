"""A step while it is decided, and while its result is on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from everystop.plan import NewSequence, StepPlan
from scheduler_svc.core.sequence import Seating

_slot = attrgetter("slot")


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens `start` to `start + num_tokens` of a sequence that the plan names."""

    seating: Seating
    start: int
    num_tokens: int

    def prompt_row_token_ids(self) -> list[int]:
        """The prompt tokens whose log-probabilities this chunk brings, empty unless they were asked for.

        Computing token i gives the distribution of token i + 1; recomputed tokens of the answer give none of the
        prompt.
        """
        request = self.seating.sequence.request
        if request.sampling.num_prompt_logprobs is None:
            return []
        return request.prompt_token_ids[self.start + 1 : self.start + self.num_tokens + 1]


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """What the result of a plan has to answer."""

    step_id: int
    sampling: list[Seating]
    """Those that sample a token, in ascending order of slots like the result's tokens."""
    chunks: list[ScheduledChunk]

    def participants(self) -> set[Seating]:
        """All that take part."""
        return {*self.sampling, *(chunk.seating for chunk in self.chunks)}


@dataclass(slots=True)
class StepDraft:
    """Collects one plan. What it has given it never takes back, so the counters of a seating move at once."""

    num_tokens_left: int
    """What is left of the token budget."""
    has_preempted: bool = False
    num_seqs: int = 0
    num_tokens: int = 0
    _admissions: list[NewSequence] = field(default_factory=list)
    _block_slots: list[int] = field(default_factory=list)
    _block_ids: list[int] = field(default_factory=list)
    _sampling: list[Seating] = field(default_factory=list)
    _chunks: list[ScheduledChunk] = field(default_factory=list)

    def admit(self, seating: Seating) -> None:
        """Send the sequence whole."""
        self._admissions.append(seating.to_new_sequence())

    def append_block(self, seating: Seating, block_id: int) -> None:
        """Send a block that was added to the block table."""
        self._block_slots.append(seating.slot)
        self._block_ids.append(block_id)

    def compute(self, seating: Seating, num_tokens: int) -> None:
        """Let a sequence catch up by `num_tokens`; when it has caught up, it samples the next one."""
        assert 1 <= num_tokens <= self.num_tokens_left
        start = seating.num_computed_tokens
        if not seating.is_decoding:
            self._chunks.append(ScheduledChunk(seating, start, num_tokens))
        seating.num_computed_tokens += num_tokens
        if seating.num_computed_tokens == seating.num_tokens:
            seating.num_tokens += 1
            self._sampling.append(seating)
        self.num_seqs += 1
        self.num_tokens += num_tokens
        self.num_tokens_left -= num_tokens

    def to_plan(self, step_id: int, epoch: int, exit_slots: list[int]) -> StepPlan:
        """The plan, with nothing in it but what changes.

        NOTE: no decode ever pauses, so `idle_slots` stays empty: all of them fit into the budget, and one that finds
        no block is preempted.
        """
        return StepPlan(
            step_id=step_id,
            epoch=epoch,
            exit_slots=exit_slots,
            admissions=self._admissions,
            block_slots=self._block_slots,
            block_ids=self._block_ids,
            chunk_slots=[chunk.seating.slot for chunk in self._chunks],
            chunk_num_tokens=[chunk.num_tokens for chunk in self._chunks],
            num_seqs=self.num_seqs,
            num_tokens=self.num_tokens,
        )

    def to_in_flight(self, step_id: int) -> InFlightStep:
        """What to remember until the result is there."""
        return InFlightStep(step_id, sorted(self._sampling, key=_slot), self._chunks)
