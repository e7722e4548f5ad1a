"""Urgent requests go first, and nobody waits for ever."""

from everystop.plan import SamplingParams, StepResult
from scheduler_svc.core import Request, Scheduler
from scheduler_svc.core.policies.priority import OVERTAKEN_PER_LEVEL
from tests.support.small_core import make_core


def add(
    core: Scheduler, request_id: str, priority: int = 0, *, num_prompt_tokens: int = 2, max_tokens: int = 1
) -> None:
    core.add(Request(request_id, [1] * num_prompt_tokens, SamplingParams(), max_tokens, priority=priority), now=0.0)


def step(core: Scheduler) -> list[str]:
    """One step of which all rows sample, its result at once; who was admitted."""
    plan = core.schedule(now=0.0)
    assert plan is not None
    core.apply(StepResult(plan.step_id, [50] * plan.num_seqs), now=0.0)
    core.check_integrity()
    return [admission.request_id for admission in plan.admissions]


def test_a_smaller_priority_boards_first_and_equals_by_arrival() -> None:
    core = make_core(max_num_seqs=1, policy="priority")
    for request_id, priority in [("later", 1), ("usual", 0), ("usual too", 0), ("urgent", -1)]:
        add(core, request_id, priority)
    assert [step(core) for _ in range(4)] == [["urgent"], ["usual"], ["usual too"], ["later"]]


def test_an_endless_flow_of_urgent_ones_overtakes_a_patient_one_only_so_often() -> None:
    core = make_core(max_num_seqs=1, policy="priority")
    add(core, "patient", 2)
    boarded = []
    while "patient" not in boarded:
        add(core, f"urgent {len(boarded)}", 0)
        boarded += step(core)
    assert len(boarded) - 1 == 2 * OVERTAKEN_PER_LEVEL - 1


def test_the_least_urgent_gives_its_blocks_back() -> None:
    core = make_core(num_blocks=4, policy="priority")
    add(core, "patient", 1, num_prompt_tokens=5, max_tokens=9)
    assert step(core) == ["patient"]
    add(core, "urgent", 0, num_prompt_tokens=5, max_tokens=5)
    assert step(core) == ["urgent"]
    while "urgent" in core.requests and not core.requests["patient"].num_preemptions:
        step(core)
    assert [sequence.num_preemptions for sequence in core.requests.values()] == [1, 0]
