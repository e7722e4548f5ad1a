"""What the seats make of plans, and each reason to refuse one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest

from everystop.errors import Reason, ServiceError
from everystop.plan import NewSequence, SamplingParams, StepPlan
from executor_svc.backend import StepBatch, StepOutput
from executor_svc.plan_checks import Limits
from executor_svc.seats import Seats

EPOCH = 77
LIMITS = Limits(
    vocab_size=100, block_size=4, num_blocks=10, max_model_len=20, max_num_seqs=3, max_num_batched_tokens=12
)


def sequence(slot: int, num_tokens: int, block_ids: list[int], num_computed_tokens: int = 0) -> NewSequence:
    return NewSequence(
        slot=slot,
        request_id=f"request-{slot}",
        attempt=0,
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=block_ids,
        sampling=SamplingParams(),
    )


def run(seats: Seats, plan: StepPlan, token_id: int = 50) -> StepBatch:
    """Apply a plan and commit it with `token_id` for everyone who samples."""
    batch = seats.apply(plan)
    seats.commit(batch, StepOutput([token_id for scheduled in batch.scheduled if scheduled.samples]))
    seats.check_integrity()
    return batch


def parts(batch: StepBatch) -> list[tuple[int, int, bool]]:
    return [(part.seat.slot, part.num_tokens, part.samples) for part in batch.scheduled]


def busy_seats() -> Seats:
    """After step 1: slot 0 decodes at token 5 (blocks 0, 1), slot 1 has computed 4 of 8 (blocks 2, 3), 2 is empty."""
    seats = Seats(LIMITS, EPOCH)
    admissions = [sequence(0, 5, [0, 1]), sequence(1, 8, [2, 3])]
    run(
        seats,
        StepPlan(
            1, EPOCH, admissions=admissions, chunk_slots=[0, 1], chunk_num_tokens=[5, 4], num_seqs=2, num_tokens=9
        ),
    )
    return seats


def steady(num_seqs: int = 1) -> StepPlan:
    return StepPlan(2, EPOCH, num_seqs=num_seqs, num_tokens=num_seqs)


def test_a_prefill_computes_what_is_named_and_samples_once_all_is_known() -> None:
    seats = Seats(LIMITS, EPOCH)
    admission = sequence(1, 6, [4, 9])
    first = run(
        seats,
        StepPlan(1, EPOCH, admissions=[admission], chunk_slots=[1], chunk_num_tokens=[4], num_seqs=1, num_tokens=4),
    )
    assert parts(first) == [(1, 4, False)]
    second = run(seats, StepPlan(2, EPOCH, chunk_slots=[1], chunk_num_tokens=[2], num_seqs=1, num_tokens=2))
    assert parts(second) == [(1, 2, True)]
    third = seats.apply(StepPlan(3, EPOCH, num_seqs=1, num_tokens=1))
    assert parts(third) == [(1, 1, True)]
    assert third.scheduled[0].seat.token_ids == [0, 1, 2, 3, 4, 5, 50]
    assert third.scheduled[0].seat.num_computed_tokens == 6


def test_scheduled_sequences_come_in_the_order_of_slots() -> None:
    seats = busy_seats()
    plan = StepPlan(
        2,
        EPOCH,
        admissions=[sequence(2, 3, [4])],
        chunk_slots=[2, 1],
        chunk_num_tokens=[3, 4],
        num_seqs=3,
        num_tokens=8,
    )
    assert parts(run(seats, plan)) == [(0, 1, True), (1, 4, True), (2, 3, True)]
    assert parts(run(seats, StepPlan(3, EPOCH, block_slots=[1], block_ids=[5], num_seqs=3, num_tokens=3))) == [
        (0, 1, True),
        (1, 1, True),
        (2, 1, True),
    ]


def test_an_idle_decode_pauses_for_one_step() -> None:
    seats = busy_seats()
    plan = StepPlan(2, EPOCH, chunk_slots=[1], chunk_num_tokens=[1], idle_slots=[0], num_seqs=1, num_tokens=1)
    assert parts(run(seats, plan)) == [(1, 1, False)]
    assert parts(run(seats, StepPlan(3, EPOCH, num_seqs=1, num_tokens=1))) == [(0, 1, True)]


def test_a_slot_and_its_blocks_can_be_given_on_in_one_plan() -> None:
    seats = busy_seats()
    plan = StepPlan(
        2,
        EPOCH,
        exit_slots=[0],
        admissions=[sequence(0, 2, [1])],
        chunk_slots=[0],
        chunk_num_tokens=[2],
        num_seqs=1,
        num_tokens=2,
    )
    batch = run(seats, plan)
    assert [seat.num_prompt_tokens for seat in batch.exited] == [5]
    assert [seat.num_prompt_tokens for seat in batch.admitted] == [2]


def test_new_blocks_go_to_the_end_of_the_table() -> None:
    seats = busy_seats()
    plan = StepPlan(2, EPOCH, block_slots=[0, 1, 0], block_ids=[9, 8, 7], num_seqs=1, num_tokens=1)
    assert run(seats, plan).scheduled[0].seat.block_ids == [0, 1, 9, 7]


def test_sequences_may_share_blocks_that_nobody_writes() -> None:
    seats = busy_seats()
    plan = StepPlan(
        2,
        EPOCH,
        admissions=[sequence(2, 8, [0, 4], num_computed_tokens=4)],
        chunk_slots=[2],
        chunk_num_tokens=[4],
        num_seqs=2,
        num_tokens=5,
    )
    assert parts(run(seats, plan)) == [(0, 1, True), (2, 4, True)]


def admit(**changes: object) -> Callable[[StepPlan], StepPlan]:
    """Adds an admission to slot 2 that would be valid but for `changes`."""
    return lambda plan: replace(plan, admissions=[replace(sequence(2, 3, [4]), **changes)])  # type: ignore[arg-type]


def admit_sampling(**changes: object) -> Callable[[StepPlan], StepPlan]:
    return admit(sampling=replace(SamplingParams(), **changes))  # type: ignore[arg-type]


REFUSALS: dict[str, tuple[Callable[[StepPlan], StepPlan], str, str]] = {
    # what is wrong: (how, the field that the refusal names, the limit that it names)
    "exit out of range": (lambda p: replace(p, exit_slots=[3]), "exit_slots", "max_num_seqs 3"),
    "exit of an empty slot": (lambda p: replace(p, exit_slots=[2]), "exit_slots", "slot 2 is empty"),
    "exit twice": (lambda p: replace(p, exit_slots=[1, 1]), "exit_slots", "1 occurs more than once"),
    "slot out of range": (admit(slot=3), "admissions[0].slot", "max_num_seqs 3"),
    "slot taken": (admit(slot=1), "admissions.slot", "slot 1 is taken"),
    "admitted twice": (
        lambda p: replace(p, admissions=[sequence(2, 3, [4]), sequence(2, 3, [5])]),
        "admissions.slot",
        "2 occurs more than once",
    ),
    "no tokens": (admit(token_ids=[]), "admissions[0].token_ids", "1 to max_model_len 20"),
    "too many tokens": (admit(token_ids=[1] * 21), "admissions[0].token_ids", "max_model_len 20"),
    "token out of vocabulary": (
        admit(token_ids=[1, 100, 2]),
        "admissions[0].token_ids",
        "100 is not below vocab_size 100",
    ),
    "no prompt": (admit(num_prompt_tokens=0), "admissions[0].num_prompt_tokens", "1 to 3"),
    "prompt beyond tokens": (admit(num_prompt_tokens=4), "admissions[0].num_prompt_tokens", "1 to 3"),
    "all computed": (admit(num_computed_tokens=3), "admissions[0].num_computed_tokens", "below the 3"),
    "block out of range": (admit(block_ids=[10]), "admissions[0].block_ids", "num_blocks 10"),
    "block twice in a table": (admit(block_ids=[4, 4]), "admissions[0].block_ids", "4 occurs more than once"),
    "allowed out of vocabulary": (
        admit_sampling(allowed_token_ids=(100,)),
        "admissions[0].sampling.allowed_token_ids",
        "vocab_size 100",
    ),
    "banned out of vocabulary": (
        admit_sampling(banned_token_ids=(100,)),
        "admissions[0].sampling.banned_token_ids",
        "vocab_size 100",
    ),
    "end token out of vocabulary": (
        admit_sampling(end_token_ids=(100,)),
        "admissions[0].sampling.end_token_ids",
        "vocab_size 100",
    ),
    "bias out of vocabulary": (
        admit_sampling(logit_bias=((100, 1.0),)),
        "admissions[0].sampling.logit_bias",
        "vocab_size 100",
    ),
    "bias infinite": (admit_sampling(logit_bias=((1, math.inf),)), "admissions[0].sampling.logit_bias", "finite"),
    "temperature below 0": (admit_sampling(temperature=-0.1), "admissions[0].sampling.temperature", "at least 0"),
    "temperature not a number": (
        admit_sampling(temperature=math.nan),
        "admissions[0].sampling.temperature",
        "at least 0",
    ),
    "top_p 0": (admit_sampling(top_p=0.0), "admissions[0].sampling.top_p", "(0, 1]"),
    "min_p above 1": (admit_sampling(min_p=1.1), "admissions[0].sampling.min_p", "[0, 1]"),
    "repetition_penalty 0": (
        admit_sampling(repetition_penalty=0.0),
        "admissions[0].sampling.repetition_penalty",
        "above 0",
    ),
    "presence_penalty infinite": (
        admit_sampling(presence_penalty=math.inf),
        "admissions[0].sampling.presence_penalty",
        "finite",
    ),
    "frequency_penalty infinite": (
        admit_sampling(frequency_penalty=-math.inf),
        "admissions[0].sampling.frequency_penalty",
        "finite",
    ),
    "more logprobs than tokens": (
        admit_sampling(num_logprobs=101),
        "admissions[0].sampling.num_logprobs",
        "vocab_size 100",
    ),
    "more prompt logprobs than tokens": (
        admit_sampling(num_prompt_logprobs=101),
        "admissions[0].sampling.num_prompt_logprobs",
        "vocab_size 100",
    ),
    "blocks without slots": (lambda p: replace(p, block_ids=[4]), "block_ids", "1 entries beside 0"),
    "block for an empty slot": (lambda p: replace(p, block_slots=[2], block_ids=[4]), "block_slots", "slot 2 is empty"),
    "new block out of range": (lambda p: replace(p, block_slots=[0], block_ids=[10]), "block_ids", "num_blocks 10"),
    "chunks without lengths": (lambda p: replace(p, chunk_slots=[1]), "chunk_num_tokens", "0 entries beside 1"),
    "chunk for an empty slot": (
        lambda p: replace(p, chunk_slots=[2], chunk_num_tokens=[1]),
        "chunk_slots",
        "slot 2 is empty",
    ),
    "chunk for a decode": (
        lambda p: replace(p, chunk_slots=[0], chunk_num_tokens=[1]),
        "chunk_slots",
        "slot 0 is decoding",
    ),
    "chunk twice": (
        lambda p: replace(p, chunk_slots=[1, 1], chunk_num_tokens=[1, 1]),
        "chunk_slots",
        "1 occurs more than once",
    ),
    "chunk of nothing": (lambda p: replace(p, chunk_slots=[1], chunk_num_tokens=[0]), "chunk_num_tokens", "1 to 4"),
    "chunk beyond known": (lambda p: replace(p, chunk_slots=[1], chunk_num_tokens=[5]), "chunk_num_tokens", "1 to 4"),
    "prefill idle": (lambda p: replace(p, idle_slots=[1]), "idle_slots", "slot 1 is not decoding"),
    "empty slot idle": (lambda p: replace(p, idle_slots=[2]), "idle_slots", "slot 2 is not decoding"),
    "idle twice": (lambda p: replace(p, idle_slots=[0, 0]), "idle_slots", "0 occurs more than once"),
    "idle and gone": (lambda p: replace(p, exit_slots=[0], idle_slots=[0]), "idle_slots", "slot 0 is not decoding"),
    "sequences miscounted": (lambda p: replace(p, num_seqs=2), "num_seqs", "2, but 1 sequences"),
    "tokens miscounted": (lambda p: replace(p, num_tokens=2), "num_tokens", "2, but 1 tokens"),
    "nothing to compute": (
        lambda p: replace(p, idle_slots=[0], num_seqs=0, num_tokens=0),
        "num_seqs",
        "at least one",
    ),
    "over the budget": (
        lambda p: replace(
            p,
            admissions=[sequence(2, 12, [4, 5, 6])],
            chunk_slots=[2],
            chunk_num_tokens=[12],
            num_seqs=2,
            num_tokens=13,
        ),
        "num_tokens",
        "max_num_batched_tokens 12",
    ),
    "table too short": (
        lambda p: replace(
            p, admissions=[sequence(2, 5, [4])], chunk_slots=[2], chunk_num_tokens=[5], num_seqs=2, num_tokens=6
        ),
        "block_ids",
        "its blocks hold 4",
    ),
    "writes another's block": (
        lambda p: replace(
            p, admissions=[sequence(2, 3, [1])], chunk_slots=[2], chunk_num_tokens=[3], num_seqs=2, num_tokens=4
        ),
        "block_ids",
        "writes block 1",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_wrong_plan_is_refused_by_field_and_limit_and_changes_nothing(case: str) -> None:
    make_wrong, field, limit = REFUSALS[case]
    seats = busy_seats()
    with pytest.raises(ServiceError) as refused:
        seats.apply(make_wrong(steady()))
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_PLAN)
    assert refused.value.field == field
    assert limit in refused.value.message
    seats.check_integrity()
    assert parts(run(seats, steady())) == [(0, 1, True)]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (StepPlan(2, EPOCH + 1, num_seqs=1, num_tokens=1), Reason.STALE_EPOCH),
        (StepPlan(1, EPOCH, num_seqs=1, num_tokens=1), Reason.STEP_GAP),
        (StepPlan(3, EPOCH, num_seqs=1, num_tokens=1), Reason.STEP_GAP),
    ],
)
def test_a_plan_out_of_turn_is_refused(plan: StepPlan, reason: Reason) -> None:
    seats = busy_seats()
    with pytest.raises(ServiceError) as refused:
        seats.apply(plan)
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    assert parts(run(seats, steady())) == [(0, 1, True)]


def test_no_sequence_is_computed_beyond_the_models_length() -> None:
    seats = Seats(LIMITS, EPOCH)
    blocks = [0, 1, 2, 3, 4, 5]
    run(
        seats,
        StepPlan(
            1,
            EPOCH,
            admissions=[sequence(0, 20, blocks, num_computed_tokens=16)],
            chunk_slots=[0],
            chunk_num_tokens=[4],
            num_seqs=1,
            num_tokens=4,
        ),
    )
    with pytest.raises(ServiceError, match="would compute 21, above max_model_len 20"):
        seats.apply(steady())


@pytest.mark.parametrize("token_ids", [[], [1, 2]])
def test_a_backend_that_samples_for_the_wrong_number_is_a_bug(token_ids: list[int]) -> None:
    seats = busy_seats()
    batch = seats.apply(steady())
    with pytest.raises(AssertionError, match=f"chose {len(token_ids)} tokens, not 1"):
        seats.commit(batch, StepOutput(token_ids))
