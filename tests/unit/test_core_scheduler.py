"""The rules of scheduling, one by one, with results written by hand."""

import pytest

from everystop.plan import SamplingParams, StepPlan, StepResult
from scheduler_svc.core import (
    CoreConfig,
    DuplicateRequestError,
    FinishReason,
    Output,
    Request,
    RequestStats,
    RequestTooLargeError,
    Scheduler,
)

EOS_ID, STOP_ID = 1, 2


def make_core(**changes: float) -> Scheduler:
    limits = {
        "block_size": 4,
        "num_blocks": 32,
        "vocab_size": 100,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "max_prefill_chunk": 8,
        "watermark": 0.0,
    }
    return Scheduler(CoreConfig(**{**limits, **changes}), epoch=7)  # type: ignore[arg-type]  # counts and one share


def make_request(request_id: str, num_prompt_tokens: int = 3, max_tokens: int = 20) -> Request:
    prompt = [10 + i for i in range(num_prompt_tokens)]
    return Request(request_id, prompt, SamplingParams(), max_tokens, frozenset({EOS_ID}), frozenset({STOP_ID}))


def schedule(core: Scheduler, now: float = 0.0) -> StepPlan:
    plan = core.schedule(now)
    core.check_integrity()
    assert plan is not None
    return plan


def apply(core: Scheduler, plan: StepPlan, token_ids: list[int], now: float = 0.0) -> list[Output]:
    outputs = core.apply(StepResult(plan.step_id, token_ids), now)
    core.check_integrity()
    return outputs


def admitted(plan: StepPlan) -> list[str]:
    return [admission.request_id for admission in plan.admissions]


def test_steady_plan_names_nothing() -> None:
    core = make_core(max_num_seqs=64, max_num_batched_tokens=512, num_blocks=256, block_size=16)
    for i in range(64):
        core.add(make_request(f"r{i}"), now=0.0)
    apply(core, schedule(core), [50] * 64)
    plan = schedule(core)
    assert plan == StepPlan(step_id=2, epoch=7, num_seqs=64, num_tokens=64)


def test_crossing_a_block_boundary_names_the_new_block_alone() -> None:
    core = make_core()
    core.add(make_request("a", num_prompt_tokens=3), now=0.0)
    assert schedule(core).admissions[0].block_ids == [0]
    assert schedule(core).block_ids == []
    assert schedule(core) == StepPlan(step_id=3, epoch=7, block_slots=[0], block_ids=[1], num_seqs=1, num_tokens=1)


def test_admission_carries_the_sequence_whole() -> None:
    core = make_core()
    request = make_request("a", num_prompt_tokens=9)
    core.add(request, now=0.0)
    plan = schedule(core)
    (admission,) = plan.admissions
    assert (admission.slot, admission.request_id, admission.attempt) == (0, "a", 1)
    assert (admission.token_ids, admission.num_prompt_tokens) == (request.prompt_token_ids, 9)
    assert (admission.block_ids, admission.num_computed_tokens) == ([0, 1, 2], 0)
    assert admission.sampling is request.sampling
    # What the core does next changes no plan that has left.
    for _ in range(6):
        token_ids = [] if plan.step_id == 1 else [50]
        apply(core, plan, token_ids)
        plan = schedule(core)
    assert (admission.token_ids, admission.block_ids) == (request.prompt_token_ids, [0, 1, 2])


def test_long_prompt_rides_along_in_chunks() -> None:
    core = make_core(max_num_batched_tokens=10, max_num_seqs=4, max_prefill_chunk=8)
    core.add(make_request("short", num_prompt_tokens=1), now=0.0)
    core.add(make_request("long", num_prompt_tokens=14), now=0.0)
    first, second = schedule(core), schedule(core)
    assert (first.chunk_slots, first.chunk_num_tokens, first.num_tokens) == ([0, 1], [1, 8], 9)
    assert (second.chunk_slots, second.chunk_num_tokens, second.num_tokens) == ([1], [6], 7)
    # Both decode from here on.
    assert schedule(core) == StepPlan(step_id=3, epoch=7, num_seqs=2, num_tokens=2)


def test_budget_goes_to_decodes_then_prefills_then_the_line() -> None:
    core = make_core(max_num_batched_tokens=6, max_prefill_chunk=4)
    core.add(make_request("a", num_prompt_tokens=1), now=0.0)
    core.add(make_request("b", num_prompt_tokens=12), now=0.0)
    core.add(make_request("c", num_prompt_tokens=9), now=0.0)
    core.add(make_request("d", num_prompt_tokens=2), now=0.0)
    assert schedule(core).chunk_num_tokens == [1, 4, 1]
    second = schedule(core)
    assert (second.chunk_slots, second.chunk_num_tokens, second.num_tokens) == ([1, 2], [4, 1], 6)
    third = schedule(core)
    assert (third.chunk_slots, third.chunk_num_tokens, third.admissions) == ([1, 2], [4, 1], [])
    fourth = schedule(core)
    assert (fourth.chunk_slots, fourth.chunk_num_tokens, fourth.num_tokens) == ([2], [4], 6)
    fifth = schedule(core)
    assert (fifth.chunk_num_tokens, admitted(fifth), fifth.num_tokens) == ([2, 2], ["d"], 6)


def test_nobody_overtakes_the_head_of_the_line() -> None:
    core = make_core(num_blocks=8)
    core.add(make_request("a", num_prompt_tokens=16, max_tokens=4), now=0.0)
    core.add(make_request("big", num_prompt_tokens=20, max_tokens=4), now=0.0)
    core.add(make_request("small", num_prompt_tokens=1), now=0.0)
    assert admitted(schedule(core)) == ["a"]
    assert admitted(schedule(core)) == []
    assert core.num_waiting == 2
    core.finish("a")
    assert admitted(schedule(core)) == ["big", "small"]


def test_boarding_needs_blocks_for_the_whole_prompt() -> None:
    core = make_core(num_blocks=8, max_prefill_chunk=4)
    core.add(make_request("a", num_prompt_tokens=16, max_tokens=4), now=0.0)
    core.add(make_request("b", num_prompt_tokens=17, max_tokens=4), now=0.0)
    assert admitted(schedule(core)) == ["a"]
    assert core.num_used_blocks == 4
    assert admitted(schedule(core)) == []


def test_watermark_holds_back_all_but_a_lone_sequence() -> None:
    core = make_core(num_blocks=10, watermark=0.25)  # 3 blocks
    core.add(make_request("a", num_prompt_tokens=16, max_tokens=4), now=0.0)
    core.add(make_request("b", num_prompt_tokens=12, max_tokens=4), now=0.0)
    core.add(make_request("c", num_prompt_tokens=4, max_tokens=4), now=0.0)
    assert admitted(schedule(core)) == ["a", "b"]
    assert admitted(schedule(core)) == []
    core.finish("a")
    core.finish("b")
    core.finish("c")
    core.add(make_request("d", num_prompt_tokens=37, max_tokens=4), now=0.0)
    assert admitted(schedule(core)) == ["d"]


def test_latest_arrival_is_preempted_and_comes_back_before_newcomers() -> None:
    core = make_core(num_blocks=4)
    core.add(make_request("old", num_prompt_tokens=4, max_tokens=9), now=0.0)
    core.add(make_request("young", num_prompt_tokens=8, max_tokens=5), now=0.0)
    apply(core, schedule(core), [50, 60])
    core.add(make_request("new", num_prompt_tokens=1, max_tokens=5), now=0.0)
    # The last free block is for the older; the younger one asks next, and is its own victim.
    plan = schedule(core)
    assert (plan.exit_slots, plan.block_slots, plan.block_ids) == ([1], [0], [3])
    assert (plan.num_seqs, plan.admissions) == (1, [])
    assert (core.num_running, core.num_waiting) == (1, 2)
    assert core.requests["young"].num_preemptions == 1
    # It waits for 3 blocks (9 tokens), and "new" waits behind it though one block is all that it needs.
    apply(core, plan, [51])
    plan = schedule(core)
    assert plan.admissions == []
    apply(core, plan, [EOS_ID])
    plan = schedule(core)
    assert admitted(plan) == ["young", "new"]
    assert (plan.admissions[0].attempt, plan.admissions[0].token_ids) == (2, [*range(10, 18), 60])
    assert core.counters.num_preemptions == 1
    assert core.counters.num_recomputed_tokens == 8


def test_old_sequence_takes_a_block_from_a_younger_one() -> None:
    core = make_core(num_blocks=4)
    core.add(make_request("old", num_prompt_tokens=8, max_tokens=9), now=0.0)
    core.add(make_request("young", num_prompt_tokens=7, max_tokens=5), now=0.0)
    first = schedule(core)
    second = schedule(core)
    assert (second.exit_slots, second.num_seqs) == ([1], 1)
    # The token of the first attempt comes late: it is dropped, and sampled again.
    assert [output.request.request_id for output in apply(core, first, [50, 60])] == ["old"]
    apply(core, second, [EOS_ID])
    third = schedule(core)
    assert (third.exit_slots, third.admissions[0].token_ids) == ([0], [10, 11, 12, 13, 14, 15, 16])
    (output,) = apply(core, third, [60])
    assert (output.request.request_id, output.token_ids) == ("young", [60])


def test_last_token_leaves_one_plan_early() -> None:
    core = make_core(max_num_seqs=1)
    core.add(make_request("a", max_tokens=2), now=0.0)
    core.add(make_request("b"), now=0.0)
    first, second, third = schedule(core), schedule(core), schedule(core)
    # Neither token of "a" has arrived, but its seat and blocks are with "b" already.
    assert (third.exit_slots, admitted(third), third.admissions[0].slot) == ([0], ["b"], 0)
    assert third.admissions[0].block_ids == first.admissions[0].block_ids
    assert set(core.requests) == {"a", "b"}
    apply(core, first, [50])
    (output,) = apply(core, second, [51])
    assert output.finish is not None
    assert (output.finish.reason, output.finish.token_id) == (FinishReason.LENGTH, None)
    assert set(core.requests) == {"b"}


def test_exit_alone_waits_for_the_next_plan() -> None:
    core = make_core()
    core.add(make_request("a", max_tokens=1), now=0.0)
    plan = schedule(core)
    assert core.schedule(now=0.0) is None
    assert core.num_used_blocks == 0
    apply(core, plan, [50])
    core.add(make_request("b"), now=0.0)
    assert schedule(core).exit_slots == [0]
    assert schedule(core).exit_slots == []


@pytest.mark.parametrize(("token_id", "reason"), [(EOS_ID, FinishReason.EOS), (STOP_ID, FinishReason.STOP_TOKEN)])
def test_end_token_drops_the_surplus_token(token_id: int, reason: FinishReason) -> None:
    core = make_core()
    core.add(make_request("a"), now=0.0)
    first, second = schedule(core), schedule(core)
    (output,) = apply(core, first, [token_id])
    assert output.token_ids == [token_id]
    assert output.finish is not None
    assert (output.finish.reason, output.finish.token_id) == (reason, token_id)
    assert core.num_used_blocks == 0
    assert apply(core, second, [50]) == []


def test_end_token_wins_over_length() -> None:
    core = make_core()
    core.add(make_request("a", max_tokens=1), now=0.0)
    (output,) = apply(core, schedule(core), [EOS_ID])
    assert output.finish is not None
    assert output.finish.reason is FinishReason.EOS


def test_cancelled_id_can_be_used_at_once() -> None:
    core = make_core()
    core.add(make_request("a"), now=0.0)
    late = schedule(core)
    with pytest.raises(DuplicateRequestError):
        core.add(make_request("a"), now=1.0)
    assert core.finish("a") == RequestStats(arrival_time=0.0, first_scheduled_time=0.0, num_attempts=1)
    assert core.finish("a") is None
    assert (core.num_running, core.num_used_blocks) == (0, 0)
    core.add(make_request("a", num_prompt_tokens=5), now=1.0)
    plan = schedule(core)
    assert (plan.exit_slots, plan.admissions[0].slot, len(plan.admissions[0].token_ids)) == ([0], 0, 5)
    assert apply(core, late, [50]) == []
    assert [output.token_ids for output in apply(core, plan, [51])] == [[51]]


def test_waiting_request_can_be_cancelled() -> None:
    core = make_core(max_num_seqs=1)
    for request_id in "abc":
        core.add(make_request(request_id), now=0.0)
    schedule(core)
    assert core.finish("b") == RequestStats(arrival_time=0.0)
    core.finish("a")
    assert admitted(schedule(core)) == ["c"]


def test_too_large_request_is_refused_with_the_number_that_fits() -> None:
    core = make_core(num_blocks=3, block_size=4)
    core.add(make_request("fits", num_prompt_tokens=8, max_tokens=5), now=0.0)  # the last token needs no room
    with pytest.raises(RequestTooLargeError, match="the largest max_tokens that fits this prompt is 5") as raised:
        core.add(make_request("a", num_prompt_tokens=8, max_tokens=6), now=0.0)
    error = raised.value
    assert (error.num_blocks_needed, error.num_blocks_available, error.max_tokens_that_fit) == (4, 3, 5)
    with pytest.raises(RequestTooLargeError) as raised:
        core.add(make_request("a", num_prompt_tokens=20, max_tokens=1), now=0.0)
    assert raised.value.max_tokens_that_fit == 0
    with pytest.raises(RequestTooLargeError) as raised:
        make_core(max_model_len=10).add(make_request("a", num_prompt_tokens=8, max_tokens=3), now=0.0)
    assert raised.value.max_tokens_that_fit == 2
    assert set(core.requests) == {"fits"}
