"""The executor's memory of who is seated: turns plans, which name only changes, into whole step batches.

    plan k ──apply──> StepBatch ──backend──> StepOutput ──commit──> known tokens and computed counts move on

A plan is checked as a whole before anything changes, so that a refused plan leaves the seats as they were.

A sequence that failed (`SequenceFailure`) goes on as if token 0 had been sampled: the plans that are already on their
way count it in. The scheduler ends it when it sees the failure and takes it out with one of the next plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from everystop.errors import Reason, ServiceError
from everystop.plan import NewSequence, StepPlan
from executor_svc.backend import ScheduledSequence, Seat, StepBatch, StepOutput
from executor_svc.plan_checks import Limits, check_plan, invalid_plan


@dataclass(frozen=True, slots=True)
class _Change:
    """What a plan changes about the seats, by slot; not yet done."""

    exited: dict[int, Seat] = field(default_factory=dict)
    admitted: dict[int, Seat] = field(default_factory=dict)
    new_block_ids: dict[int, list[int]] = field(default_factory=dict)
    num_tables: Counter[int] = field(default_factory=Counter)
    """By block id: in how many more block tables (or fewer, below 0) it is afterwards."""


class Seats:
    """The sequences of one session, by slot. Not thread-safe."""

    def __init__(self, limits: Limits, epoch: int) -> None:
        self._limits = limits
        self._epoch = epoch
        self._next_step_id = 1
        self._seats: dict[int, Seat] = {}
        # The part of a decode in a step never changes, so it is made once. Ascending by slot.
        self._decodes: dict[int, ScheduledSequence] = {}
        # By block id: in how many block tables it is. Sequences may share blocks that none of them writes.
        self._num_tables = [0] * limits.num_blocks

    def apply(self, plan: StepPlan) -> StepBatch:
        """Take in what `plan` changes and return the whole step.

        Raises ServiceError FAILED_PRECONDITION (STALE_EPOCH, STEP_GAP) or INVALID_ARGUMENT (INVALID_PLAN), and then
        leaves the seats as they were.
        """
        self._check_turn(plan)
        check_plan(plan, self._limits)
        change = self._read_change(plan)
        scheduled = self._select(plan, change)
        self._check_counts(plan, scheduled)
        self._check_blocks(scheduled, change)
        self._make(change)
        self._next_step_id += 1
        return StepBatch(plan.step_id, list(change.exited.values()), list(change.admitted.values()), scheduled)

    def commit(self, batch: StepBatch, output: StepOutput) -> None:
        """Count in what the backend computed for the last applied plan."""
        sampling = [sequence.seat for sequence in batch.scheduled if sequence.samples]
        assert len(output.token_ids) == len(sampling), (
            f"the backend chose {len(output.token_ids)} tokens, not {len(sampling)}"
        )
        for sequence in batch.scheduled:
            sequence.seat.num_computed_tokens += sequence.num_tokens
        for seat, token_id in zip(sampling, output.token_ids, strict=True):
            seat.token_ids.append(token_id)
        new_decodes = [seat for seat in sampling if seat.slot not in self._decodes]
        if new_decodes:
            for seat in new_decodes:
                self._decodes[seat.slot] = ScheduledSequence(seat, num_tokens=1, samples=True)
            self._decodes = dict(sorted(self._decodes.items()))

    @property
    def num_seqs(self) -> int:
        """How many are seated."""
        return len(self._seats)

    @property
    def last_step_id(self) -> int:
        """The last plan that was taken in; 0 before the first."""
        return self._next_step_id - 1

    def request_ids(self) -> list[str]:
        """Who is seated, for logs."""
        return [seat.request_id for seat in self._seats.values()]

    def check_integrity(self) -> None:
        """Assert that what is kept for speed agrees with the seats."""
        decode_slots = list(self._decodes)
        assert decode_slots == sorted(decode_slots)
        for slot, seat in self._seats.items():
            is_decode = slot in self._decodes
            assert seat.slot == slot
            assert seat.num_computed_tokens < len(seat.token_ids)
            assert not is_decode or seat.num_computed_tokens == len(seat.token_ids) - 1
            assert not is_decode or self._decodes[slot].seat is seat
        num_tables = Counter(block_id for seat in self._seats.values() for block_id in seat.block_ids)
        assert sum(self._num_tables) == num_tables.total()
        assert all(self._num_tables[block_id] == count for block_id, count in num_tables.items())

    def _check_turn(self, plan: StepPlan) -> None:
        if plan.epoch != self._epoch:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                Reason.STALE_EPOCH,
                f"epoch: {plan.epoch:x}, this session's is {self._epoch:x}",
                field="epoch",
            )
        if plan.step_id != self._next_step_id:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                Reason.STEP_GAP,
                f"step_id: {plan.step_id}, the next is {self._next_step_id}",
                field="step_id",
            )

    def _read_change(self, plan: StepPlan) -> _Change:
        """What `plan` changes, checked against who is seated, in the order in which it applies."""
        change = _Change()
        for slot in plan.exit_slots:
            change.exited[slot] = seat = self._seated("exit_slots", slot, change)
            change.num_tables.subtract(seat.block_ids)
        for admission in plan.admissions:
            if admission.slot in self._seats and admission.slot not in change.exited:
                holder = self._seats[admission.slot].request_id
                raise invalid_plan("admissions.slot", f"slot {admission.slot} is taken by request {holder!r}")
            change.admitted[admission.slot] = _new_seat(admission)
            change.num_tables.update(admission.block_ids)
        for slot, block_id in zip(plan.block_slots, plan.block_ids, strict=True):
            self._seated("block_slots", slot, change)
            change.new_block_ids.setdefault(slot, []).append(block_id)
            change.num_tables[block_id] += 1
        return change

    def _seated(self, field_name: str, slot: int, change: _Change) -> Seat:
        """Who sits in `slot` once `change` is made."""
        seat = change.admitted.get(slot)
        if seat is None and slot not in change.exited:
            seat = self._seats.get(slot)
        if seat is None:
            raise invalid_plan(field_name, f"slot {slot} is empty (max_num_seqs {self._limits.max_num_seqs})")
        return seat

    def _select(self, plan: StepPlan, change: _Change) -> list[ScheduledSequence]:
        """Who takes part in the step: decodes unless they pause, prefills where they are named."""
        for slot in plan.idle_slots:
            if slot not in self._decodes or slot in change.exited:
                raise invalid_plan("idle_slots", f"slot {slot} is not decoding, so it can't pause")
        absent = change.exited.keys() | plan.idle_slots
        scheduled = [decode for slot, decode in self._decodes.items() if slot not in absent]
        for slot, num_tokens in zip(plan.chunk_slots, plan.chunk_num_tokens, strict=True):
            seat = self._seated("chunk_slots", slot, change)
            if slot in self._decodes and slot not in change.exited:
                raise invalid_plan("chunk_slots", f"slot {slot} is decoding, which takes no chunk")
            num_left = len(seat.token_ids) - seat.num_computed_tokens
            if not 1 <= num_tokens <= num_left:
                raise invalid_plan("chunk_num_tokens", f"{num_tokens} in slot {slot}, not 1 to {num_left} known tokens")
            scheduled.append(ScheduledSequence(seat, num_tokens, samples=num_tokens == num_left))
        if plan.chunk_slots:
            scheduled.sort(key=lambda sequence: sequence.seat.slot)
        return scheduled

    def _check_counts(self, plan: StepPlan, scheduled: Sequence[ScheduledSequence]) -> None:
        num_tokens = sum(sequence.num_tokens for sequence in scheduled)
        if plan.num_seqs != len(scheduled):
            raise invalid_plan("num_seqs", f"{plan.num_seqs}, but {len(scheduled)} sequences take part")
        if plan.num_tokens != num_tokens:
            raise invalid_plan("num_tokens", f"{plan.num_tokens}, but {num_tokens} tokens take part")
        if not scheduled:
            raise invalid_plan("num_seqs", "0, but a step computes at least one sequence")
        if num_tokens > self._limits.max_num_batched_tokens:
            limit = self._limits.max_num_batched_tokens
            raise invalid_plan("num_tokens", f"{num_tokens}, above max_num_batched_tokens {limit}")

    def _check_blocks(self, scheduled: Sequence[ScheduledSequence], change: _Change) -> None:
        """Each sequence has the blocks that it writes in this step, and has them for itself.

        table        | b0 | b1 | b2 | b3 |        first = num_computed // block_size     (b1)
        computed      xxxx xx                     last  = (end - 1) // block_size        (b2)
        this step            ++ +++               b1 and b2 are written; b0 may be shared
        """
        block_size, max_model_len = self._limits.block_size, self._limits.max_model_len
        for sequence in scheduled:
            seat = sequence.seat
            end = seat.num_computed_tokens + sequence.num_tokens
            if end > max_model_len:
                raise invalid_plan(
                    "num_tokens", f"slot {seat.slot} would compute {end}, above max_model_len {max_model_len}"
                )
            new_block_ids = change.new_block_ids.get(seat.slot)
            table = seat.block_ids + new_block_ids if new_block_ids else seat.block_ids
            max_tokens = len(table) * block_size
            if end > max_tokens:
                raise invalid_plan(
                    "block_ids", f"slot {seat.slot} would compute {end} tokens, its blocks hold {max_tokens}"
                )
            for block_id in table[seat.num_computed_tokens // block_size : (end - 1) // block_size + 1]:
                if self._num_tables[block_id] + change.num_tables.get(block_id, 0) != 1:
                    raise invalid_plan(
                        "block_ids", f"slot {seat.slot} writes block {block_id}, which is in more than one place"
                    )

    def _make(self, change: _Change) -> None:
        for slot in change.exited:
            del self._seats[slot]
            self._decodes.pop(slot, None)
        self._seats.update(change.admitted)
        for slot, new_block_ids in change.new_block_ids.items():
            self._seats[slot].block_ids.extend(new_block_ids)
        for block_id, num_more in change.num_tables.items():
            self._num_tables[block_id] += num_more


def _new_seat(admission: NewSequence) -> Seat:
    return Seat(
        slot=admission.slot,
        request_id=admission.request_id,
        attempt=admission.attempt,
        token_ids=list(admission.token_ids),
        num_prompt_tokens=admission.num_prompt_tokens,
        num_computed_tokens=admission.num_computed_tokens,
        block_ids=list(admission.block_ids),
        sampling=admission.sampling,
    )
