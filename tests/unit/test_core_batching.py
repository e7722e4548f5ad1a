"""Static batching, and that a policy is a plug-in."""

import pytest

from everystop.plan import SamplingParams, StepPlan, StepResult
from scheduler_svc.core import Request, Scheduler
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.sequence import Seating, Sequence
from tests.support.small_core import make_core


def add(core: Scheduler, request_id: str, num_prompt_tokens: int = 2, max_tokens: int = 9, priority: int = 0) -> None:
    prompt = list(range(num_prompt_tokens))
    core.add(Request(request_id, prompt, SamplingParams(), max_tokens, priority=priority), now=0.0)


def step(core: Scheduler) -> list[str]:
    """One step, its result at once; who was admitted."""
    plan = core.schedule(now=0.0)
    assert plan is not None
    core.apply(StepResult(plan.step_id, [50] * num_samples(core, plan)), now=0.0)
    core.check_integrity()
    return [admission.request_id for admission in plan.admissions]


def num_samples(core: Scheduler, plan: StepPlan) -> int:
    seatings = [sequence.seating for sequence in core.requests.values()]
    return sum(seating is not None and seating.num_tokens > len(seating.sequence.token_ids) for seating in seatings)


def test_continuous_batch_refills_the_seat_of_one_that_ended() -> None:
    core = make_core(batching="continuous")
    for request_id in "abcd":
        add(core, request_id)
    assert step(core) == ["a", "b", "c"]
    core.finish("a")
    assert step(core) == ["d"]


def test_static_batch_is_kept_until_its_longest_ends() -> None:
    core = make_core(batching="static")
    add(core, "a", max_tokens=1)
    add(core, "b", max_tokens=4)
    assert step(core) == ["a", "b"]
    add(core, "c")
    assert [step(core) for _ in range(3)] == [[], [], []]
    assert step(core) == ["c"]


def test_static_batch_takes_what_waits_at_its_first_step_up_to_the_seats() -> None:
    core = make_core(batching="static", max_num_seqs=2)
    for request_id in "abc":
        add(core, request_id)
    assert step(core) == ["a", "b"]
    core.finish("a")
    assert step(core) == []
    core.finish("b")
    assert step(core) == ["c"]


def test_static_batch_boards_over_as_many_steps_as_the_budget_needs() -> None:
    core = make_core(batching="static")
    for request_id in "abc":
        add(core, request_id, num_prompt_tokens=5)
    assert step(core) == ["a", "b"]  # 5 tokens, and 1 of b's
    assert step(core) == ["c"]
    assert core.num_running == 3


def test_static_batch_closes_behind_the_first_that_lacks_blocks() -> None:
    core = make_core(batching="static", num_blocks=5)
    add(core, "a", num_prompt_tokens=3, max_tokens=6)
    add(core, "b", num_prompt_tokens=2, max_tokens=9)
    add(core, "c", num_prompt_tokens=13, max_tokens=2)
    assert step(core) == ["a", "b"]
    core.finish("a")
    core.finish("c")
    add(core, "d")
    assert step(core) == []
    core.finish("b")
    assert step(core) == ["d"]


def test_member_that_lacked_blocks_does_not_board_when_another_ends() -> None:
    core = make_core(batching="static", num_blocks=5)
    add(core, "a", num_prompt_tokens=3, max_tokens=6)
    add(core, "b", num_prompt_tokens=2, max_tokens=9)
    add(core, "c", num_prompt_tokens=13, max_tokens=2)
    assert step(core) == ["a", "b"]
    core.finish("a")
    assert step(core) == []
    core.finish("b")
    assert step(core) == ["c"]


def test_preempted_member_comes_back_to_its_static_batch() -> None:
    core = make_core(batching="static", num_blocks=4, max_num_seqs=3)
    add(core, "a", num_prompt_tokens=2, max_tokens=12)
    add(core, "b", num_prompt_tokens=2, max_tokens=12)
    add(core, "c", num_prompt_tokens=2, max_tokens=4)
    add(core, "later")
    assert step(core) == ["a", "b", "c"]
    admissions = [step(core) for _ in range(12)]
    assert core.counters.num_preemptions > 0
    assert ["b"] in admissions
    assert ["later"] not in admissions


def test_preempted_member_comes_back_to_a_closed_batch() -> None:
    core = make_core(batching="static", num_blocks=6, max_num_seqs=4)
    for request_id in "abd":
        add(core, request_id, num_prompt_tokens=1, max_tokens=16)
    add(core, "large", num_prompt_tokens=17, max_tokens=2)
    assert step(core) == ["a", "b", "d"]
    while not core.counters.num_preemptions:
        assert step(core) == []
    core.finish("a")
    assert step(core) == ["d"]


class LowestFirst:
    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        return (sequence.request.priority,)

    def choose_victim(self, candidates: list[Seating]) -> Seating:
        return candidates[-1]


def test_policy_is_a_class_and_a_line_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "lowest_first", LowestFirst)
    core = make_core(batching="continuous", policy="lowest_first", num_blocks=3)
    add(core, "patient", num_prompt_tokens=4, max_tokens=9, priority=5)
    assert step(core) == ["patient"]
    add(core, "also patient", priority=5, max_tokens=4)
    add(core, "urgent", num_prompt_tokens=4, max_tokens=9, priority=1)
    assert step(core) == ["urgent"]
    # The urgent one needs a block, and the one that came first gives way.
    plan = core.schedule(now=0.0)
    assert plan is not None
    assert (plan.exit_slots, plan.block_slots, plan.num_seqs) == ([0], [1], 1)
    assert [sequence.num_preemptions for sequence in core.requests.values()] == [1, 0, 0]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="policy must be one of fcfs, priority, not 'lifo'"):
        make_core(policy="lifo", batching="static")
    with pytest.raises(ValueError, match="batching must be one of continuous, static, not 'elastic'"):
        make_core(batching="elastic")
