"""What happens between a plan and its result: requests end, give way and come back while tokens are on their way."""

from __future__ import annotations

import pytest

from everystop.plan import SamplingParams, StepResult
from everystop.testing import cranked
from scheduler_svc.core import CoreConfig, FinishReason, Output, Request, Scheduler

EOS = 0


def new_scheduler(**changes: object) -> Scheduler:
    limits = {"block_size": 2, "num_blocks": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8, "watermark": 0.0}
    rest = {"vocab_size": 50, "max_model_len": 9, "max_prefill_chunk": 8}
    return Scheduler(CoreConfig(**{**limits, **rest, **changes}), epoch=1)  # type: ignore[arg-type]


def request(request_id: str) -> Request:
    return Request(request_id, [7, 8, 9], SamplingParams(), max_tokens=6, eos_token_ids=frozenset({EOS}))


def told(outputs: list[Output]) -> dict[str, list[int]]:
    return {output.request.request_id: output.token_ids for output in outputs}


@pytest.mark.parametrize(
    "num_steps_before", [0, 1, 2, 5], ids=["waiting", "in prefill", "at its first token", "in decode"]
)
@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_an_abort_between_a_plan_and_its_result_changes_nobody_else(num_steps_before: int, victim: str) -> None:
    prompts = {"a": "first " * 3, "b": "second " * 3, "c": "third " * 3}

    def tokens(aborted: str | None) -> dict[str, list[int]]:
        crank = cranked(plan_delay=1, max_num_seqs=2, max_prefill_chunk=16, block_size=4, num_blocks=20)
        for request_id, prompt in prompts.items():
            crank.add(prompt, max_tokens=20, request_id=request_id)
        for _ in range(num_steps_before):
            crank.step()
        if aborted is not None:
            crank.cancel(aborted)
            crank.scheduler.check_integrity()
            crank.add("another with its id", max_tokens=20, request_id=aborted)
        crank.run()
        assert crank.scheduler.num_used_blocks == 0
        return {request_id: crank.tokens(request_id) for request_id in prompts}

    alone = cranked()
    alone.add("another with its id", max_tokens=20, request_id=victim)
    alone.run()
    assert tokens(victim) == tokens(None) | {victim: alone.tokens(victim)}


def test_end_of_sequence_in_the_step_after_a_preemption_ends_one_and_brings_back_the_other() -> None:
    scheduler = new_scheduler()
    scheduler.add(request("old"), 0.0)
    scheduler.add(request("young"), 0.0)
    scheduler.schedule(0.0)
    scheduler.schedule(0.0)
    assert told(scheduler.apply(StepResult(1, [11, 21]), 0.0)) == {"old": [11], "young": [21]}

    third = scheduler.schedule(0.0)  # the old one needs a block; the young one gives way
    assert third is not None
    assert third.exit_slots == [1]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    # Its token of the second step belongs to an attempt that is over, though it would have ended it.
    assert told(scheduler.apply(StepResult(2, [12, EOS]), 0.0)) == {"old": [12]}
    (ended,) = scheduler.apply(StepResult(3, [EOS]), 0.0)
    assert ended.finish is not None
    assert ended.finish.reason is FinishReason.EOS
    scheduler.check_integrity()

    fourth = scheduler.schedule(0.0)
    assert fourth is not None
    (admission,) = fourth.admissions
    assert (admission.request_id, admission.attempt, admission.token_ids) == ("young", 2, [7, 8, 9, 21])
    (ended,) = scheduler.apply(StepResult(4, [EOS]), 0.0)
    assert ended.token_ids == [EOS]
    assert ended.finish is not None
    assert ended.finish.reason is FinishReason.EOS
    assert (scheduler.requests, scheduler.num_used_blocks) == ({}, 0)
    scheduler.check_integrity()


def test_a_token_of_an_old_attempt_lands_on_nobody() -> None:
    """The same request sits in the same slot again before the results of its first attempt are in."""
    scheduler = new_scheduler(num_blocks=5)
    scheduler.add(request("old"), 0.0)
    scheduler.add(request("young"), 0.0)
    plans = [scheduler.schedule(0.0) for _ in range(3)]
    # Three plans ahead, nothing observed: the young one has given way in one of them and waits.
    assert [plan is not None and plan.exit_slots for plan in plans] == [[], [], [1]]
    assert scheduler.finish("old") is not None
    fourth = scheduler.schedule(0.0)
    assert fourth is not None
    assert [(admission.slot, admission.attempt) for admission in fourth.admissions] == [(0, 2)]
    for step_id, token_ids in ((1, [11, 21]), (2, [12, 22]), (3, [13])):
        assert scheduler.apply(StepResult(step_id, token_ids), 0.0) == []
    assert told(scheduler.apply(StepResult(4, [21]), 0.0)) == {"young": [21]}
    scheduler.check_integrity()
