"""Urgent requests go first, and nobody waits for ever."""

from everystop.plan import SamplingParams, StepResult
from scheduler_svc.core import CoreConfig, Request, Scheduler
from scheduler_svc.core.policies.priority import OVERTAKEN_PER_LEVEL


def make_core(*, num_blocks: int = 32, max_num_seqs: int = 1) -> Scheduler:
    config = CoreConfig(
        block_size=4,
        num_blocks=num_blocks,
        vocab_size=100,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=16,
        max_model_len=64,
        max_prefill_chunk=16,
        watermark=0.0,
    )
    return Scheduler(config, epoch=7, policy="priority")


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
    core = make_core()
    for request_id, priority in [("later", 1), ("usual", 0), ("usual too", 0), ("urgent", -1)]:
        add(core, request_id, priority)
    assert [step(core) for _ in range(4)] == [["urgent"], ["usual"], ["usual too"], ["later"]]


def test_an_endless_flow_of_urgent_ones_overtakes_a_patient_one_only_so_often() -> None:
    core = make_core()
    add(core, "patient", 2)
    boarded = []
    while "patient" not in boarded:
        add(core, f"urgent {len(boarded)}", 0)
        boarded += step(core)
    assert len(boarded) - 1 == 2 * OVERTAKEN_PER_LEVEL - 1


def test_the_least_urgent_gives_its_blocks_back() -> None:
    core = make_core(num_blocks=4, max_num_seqs=2)
    add(core, "patient", 1, num_prompt_tokens=7, max_tokens=9)
    assert step(core) == ["patient"]
    add(core, "urgent", 0, num_prompt_tokens=7, max_tokens=5)
    assert step(core) == ["urgent"]
    while "urgent" in core.requests and not core.requests["patient"].num_preemptions:
        step(core)
    assert [sequence.num_preemptions for sequence in core.requests.values()] == [1, 0]
