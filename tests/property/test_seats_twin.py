"""The seats against a twin that keeps nothing for speed, on random valid plans with spoilt ones in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everystop.errors import ServiceError
from everystop.plan import NewSequence, SamplingParams, StepPlan
from executor_svc.backend import StepBatch, StepOutput
from executor_svc.plan_checks import Limits
from executor_svc.seats import Seats

LIMITS = Limits(vocab_size=50, block_size=3, num_blocks=14, max_model_len=18, max_num_seqs=5, max_num_batched_tokens=16)
EPOCH = 9


@dataclass
class Row:
    """One sequence of the twin."""

    request_id: str
    token_ids: list[int]
    num_computed: int
    table: list[int]
    has_sampled: bool = False

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.num_computed


class Twin:
    """Makes valid plans and knows, by looking at everything each time, which batch they must become."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.rows: dict[int, Row] = {}
        self.num_requests = 0
        self.step_id = 0

    def free_blocks(self) -> list[int]:
        held = {block_id for row in self.rows.values() for block_id in row.table}
        return [block_id for block_id in range(LIMITS.num_blocks) if block_id not in held]

    def make_plan(self) -> tuple[StepPlan, list[tuple[int, int]]] | None:
        """The next plan and (slot, number of tokens) of each that takes part; None when nobody can."""
        self.step_id += 1
        plan = StepPlan(self.step_id, EPOCH)
        plan.exit_slots.extend(slot for slot, row in self.rows.items() if self._must_exit(row))
        for slot in plan.exit_slots:
            del self.rows[slot]
        while len(self.rows) < LIMITS.max_num_seqs and self.rng.random() < 0.5:
            self._admit(plan)
        parts = self._work(plan)
        if not parts:
            self.step_id -= 1
            return None
        num_tokens = sum(num_tokens for _, num_tokens in parts)
        return replace(plan, num_seqs=len(parts), num_tokens=num_tokens), parts

    def commit(self, parts: list[tuple[int, int]]) -> list[int]:
        """Compute; returns the tokens that were sampled."""
        sampled = []
        for slot, num_tokens in parts:
            row = self.rows[slot]
            row.num_computed += num_tokens
            if not row.num_left:
                sampled.append(self.rng.randrange(LIMITS.vocab_size))
                row.token_ids.append(sampled[-1])
                row.has_sampled = True
        return sampled

    def _must_exit(self, row: Row) -> bool:
        return row.num_computed == LIMITS.max_model_len or self.rng.random() < 0.08

    def _admit(self, plan: StepPlan) -> None:
        slot = self.rng.choice([slot for slot in range(LIMITS.max_num_seqs) if slot not in self.rows])
        token_ids = [self.rng.randrange(LIMITS.vocab_size) for _ in range(self.rng.randint(1, 12))]
        # Whole blocks that another sequence has filled may be shared.
        full = [b for row in self.rows.values() for b in row.table[: row.num_computed // LIMITS.block_size]]
        max_shared = (len(token_ids) - 1) // LIMITS.block_size
        table = sorted(set(full))[: self.rng.randint(0, max_shared)] if self.rng.random() < 0.3 else []
        num_computed = len(table) * LIMITS.block_size
        self.num_requests += 1
        self.rows[slot] = row = Row(f"request-{self.num_requests}", token_ids, num_computed, table)
        num_prompt_tokens = self.rng.randint(1, len(token_ids))
        plan.admissions.append(
            NewSequence(
                slot, row.request_id, 0, list(token_ids), num_prompt_tokens, num_computed, list(table), SamplingParams()
            )
        )

    def _work(self, plan: StepPlan) -> list[tuple[int, int]]:
        parts, budget = [], LIMITS.max_num_batched_tokens
        for slot, row in sorted(self.rows.items(), key=lambda item: not item[1].has_sampled):
            num_tokens = 1 if row.has_sampled else self.rng.randint(0, min(row.num_left, budget))
            can_compute = num_tokens and self.rng.random() < 0.9 and self._grow(plan, slot, row, num_tokens)
            if not can_compute and row.has_sampled:
                plan.idle_slots.append(slot)
            elif can_compute:
                parts.append((slot, num_tokens))
                budget -= num_tokens
                if not row.has_sampled:
                    plan.chunk_slots.append(slot)
                    plan.chunk_num_tokens.append(num_tokens)
        return sorted(parts)

    def _grow(self, plan: StepPlan, slot: int, row: Row, num_tokens: int) -> bool:
        num_missing = -(-(row.num_computed + num_tokens) // LIMITS.block_size) - len(row.table)
        free = self.free_blocks()
        if num_missing > len(free):
            return False
        for block_id in self.rng.sample(free, max(num_missing, 0)):
            plan.block_slots.append(slot)
            plan.block_ids.append(block_id)
            row.table.append(block_id)
        return True


def check_batch(batch: StepBatch, plan: StepPlan, parts: list[tuple[int, int]], rows: dict[int, Row]) -> None:
    assert [seat.slot for seat in batch.exited] == plan.exit_slots
    assert [seat.slot for seat in batch.admitted] == [admission.slot for admission in plan.admissions]
    assert [(part.seat.slot, part.num_tokens) for part in batch.scheduled] == parts
    for part in batch.scheduled:
        row = rows[part.seat.slot]
        assert part.samples == (part.num_tokens == row.num_left)
        assert part.seat.request_id == row.request_id
        assert part.seat.token_ids == row.token_ids
        assert part.seat.num_computed_tokens == row.num_computed
        assert part.seat.block_ids == row.table


Spoiler = Callable[[StepPlan, Twin], StepPlan | None]


def _chunk_of_a_decode(plan: StepPlan, twin: Twin) -> StepPlan | None:
    decodes = [slot for slot, row in twin.rows.items() if row.has_sampled]
    if not decodes:
        return None
    slots, counts = [*plan.chunk_slots, decodes[0]], [*plan.chunk_num_tokens, 1]
    return replace(plan, chunk_slots=slots, chunk_num_tokens=counts)


def _without_a_needed_block(plan: StepPlan, twin: Twin) -> StepPlan | None:
    # Each block in the plan was added for a token of this very step.
    return replace(plan, block_slots=plan.block_slots[:-1], block_ids=plan.block_ids[:-1]) if plan.block_ids else None


def _a_written_block_twice(plan: StepPlan, twin: Twin) -> StepPlan | None:
    others = [slot for slot in twin.rows if plan.block_slots and slot != plan.block_slots[0]]
    if not others:
        return None
    slots, block_ids = [*plan.block_slots, others[0]], [*plan.block_ids, plan.block_ids[0]]
    return replace(plan, block_slots=slots, block_ids=block_ids)


def _an_admission_over_another(plan: StepPlan, twin: Twin) -> StepPlan | None:
    admitted = {admission.slot for admission in plan.admissions}
    taken = [slot for slot in twin.rows if slot not in admitted]
    if not taken:
        return None
    intruder = NewSequence(taken[0], "intruder", 0, [1], 1, 0, [], SamplingParams())
    return replace(plan, admissions=[*plan.admissions, intruder])


def _an_exit_of_nobody(plan: StepPlan, twin: Twin) -> StepPlan | None:
    return replace(plan, exit_slots=[*plan.exit_slots, LIMITS.max_num_seqs])


SPOILERS: list[Spoiler] = [
    _chunk_of_a_decode,
    _without_a_needed_block,
    _a_written_block_twice,
    _an_admission_over_another,
    _an_exit_of_nobody,
    lambda plan, _: replace(plan, epoch=EPOCH + 1),
    lambda plan, _: replace(plan, step_id=plan.step_id + 1),
    lambda plan, _: replace(plan, num_seqs=plan.num_seqs + 1),
    lambda plan, _: replace(plan, num_tokens=plan.num_tokens - 1),
    lambda plan, _: replace(plan, idle_slots=[*plan.idle_slots, LIMITS.max_num_seqs]),
    lambda plan, _: replace(plan, block_ids=[*plan.block_ids, 0]),
    lambda plan, _: (
        replace(plan, chunk_num_tokens=[plan.num_tokens + 99, *plan.chunk_num_tokens[1:]]) if plan.chunk_slots else None
    ),
]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_every_valid_plan_becomes_the_batch_that_the_twin_expects(seed: int) -> None:
    rng = random.Random(seed)
    twin, seats = Twin(rng), Seats(LIMITS, EPOCH)
    for _ in range(25):
        made = twin.make_plan()
        if made is None:
            twin, seats = Twin(rng), Seats(LIMITS, EPOCH)
            continue
        plan, parts = made
        spoilt = rng.choice(SPOILERS)(plan, twin)
        if spoilt is not None:
            with pytest.raises(ServiceError):
                seats.apply(spoilt)
            seats.check_integrity()
        batch = seats.apply(plan)
        check_batch(batch, plan, parts, twin.rows)
        seats.commit(batch, StepOutput(twin.commit(parts)))
        seats.check_integrity()
