"""The hand-cranked core, used as a user's own tests would."""

from __future__ import annotations

from typing import Any

import pytest

from everystop.plan import SamplingParams
from everystop.testing import cranked
from scheduler_svc.core import FinishReason

PROMPTS = ["Once upon a time", "The", "In the beginning there was a bus that stopped at every stop"]


def answers(plan_delay: int = 0, **settings: Any) -> tuple[list[list[int]], int]:
    """What the prompts are answered, and how often somebody was preempted."""
    crank = cranked(plan_delay=plan_delay, block_size=4, **settings)
    request_ids = [crank.add(prompt, max_tokens=20) for prompt in PROMPTS]
    crank.run()
    finishes = [crank.finish(request_id) for request_id in request_ids]
    assert all(finish is not None and finish.reason is FinishReason.LENGTH for finish in finishes)
    num_preemptions = sum(finish.stats.num_preemptions for finish in finishes if finish is not None)
    return [crank.tokens(request_id) for request_id in request_ids], num_preemptions


def test_each_step_brings_one_plan_and_its_tokens() -> None:
    crank = cranked()
    request_id = crank.add("Hi", max_tokens=2)
    first, second, third = crank.step(), crank.step(), crank.step()
    assert first.plan is not None
    assert [admission.request_id for admission in first.plan.admissions] == [request_id]
    assert [output.token_ids for output in first.outputs] == [crank.tokens(request_id)[:1]]
    assert second.plan is not None
    assert second.plan.admissions == []
    assert second.outputs[0].finish is not None
    assert (third.plan, third.result, third.outputs) == (None, None, [])
    assert len(crank.tokens(request_id)) == 2


def test_a_plan_ahead_comes_before_the_result_of_the_last() -> None:
    crank = cranked(plan_delay=1)
    crank.add("Hi", max_tokens=3)
    first, second = crank.step(), crank.step()
    assert first.plan is not None
    assert first.result is None
    assert second.plan is not None
    assert second.result is not None
    assert (second.plan.step_id, second.result.step_id) == (2, 1)


def test_no_token_depends_on_delay_batching_chunks_or_room() -> None:
    expected, _ = answers()
    for plan_delay in (0, 1, 3):
        tight, num_preemptions = answers(
            plan_delay, num_blocks=24, max_num_seqs=3, max_num_batched_tokens=8, max_prefill_chunk=5, watermark=0.0
        )
        assert num_preemptions > 0
        assert tight == expected
    assert answers(batching="static", max_num_seqs=2)[0] == expected


def test_a_restart_of_the_executor_loses_and_repeats_nothing() -> None:
    expected, _ = answers()
    crank = cranked(plan_delay=1)
    request_ids = [crank.add(prompt, max_tokens=20) for prompt in PROMPTS]
    for _ in range(7):
        crank.step()
    crank.restart_executor()
    crank.run()
    assert [crank.tokens(request_id) for request_id in request_ids] == expected


def test_a_cancelled_request_gets_no_more_tokens() -> None:
    crank = cranked(plan_delay=1)
    request_id = crank.add("Hi", max_tokens=50)
    for _ in range(5):
        crank.step()
    num_tokens = len(crank.tokens(request_id))
    crank.cancel(request_id)
    crank.run()
    assert len(crank.tokens(request_id)) == num_tokens > 0
    assert crank.scheduler.num_used_blocks == 0


def test_end_of_sequence_and_stop_tokens_end_it_and_can_be_ignored() -> None:
    crank = cranked(mock_eos_rate=1.0)
    ended, ignored = crank.add("Hi"), crank.add("Hi", ignore_eos=True, max_tokens=4)
    stopped = crank.add("Hi", sampling=SamplingParams(temperature=0.0, logit_bias=((65, 100.0),)), stop_token_ids=[65])
    crank.run()
    reasons = [finish.reason for finish in map(crank.finish, (ended, ignored, stopped)) if finish is not None]
    assert reasons == [FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP_TOKEN]


def test_time_is_modelled_and_not_spent() -> None:
    crank = cranked(mock_step_ms=60_000.0, mock_token_us=1e6)
    request_id = crank.add("Hi", max_tokens=2)
    crank.run()
    assert crank.now == pytest.approx(2 * 60.0 + 3 * 1.0)
    finish = crank.finish(request_id)
    assert finish is not None
    assert finish.stats.first_token_time == pytest.approx(62.0)


def test_a_run_that_does_not_end_is_told() -> None:
    crank = cranked()
    crank.add("Hi", max_tokens=50)
    with pytest.raises(AssertionError, match="after 10 steps"):
        crank.run(max_steps=10)
