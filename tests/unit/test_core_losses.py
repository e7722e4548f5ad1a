"""Requests that kill their executor are given up, alone; executors that die of something else cost nobody anything."""

import pytest

from everystop.testing import cranked
from scheduler_svc.core import FinishReason


class ExecutorDiedError(Exception):
    """The executor, of a step."""


def make_deadly(crank, is_deadly) -> None:
    """Let the executor die of every step that has a seat for which `is_deadly` holds."""
    execute = crank._backend.execute

    def execute_or_die(batch):
        if any(is_deadly(scheduled.seat) for scheduled in batch.scheduled):
            raise ExecutorDiedError
        return execute(batch)

    crank._backend.execute = execute_or_die


def run_with_deaths(crank, *, max_deaths: int) -> int:
    num_deaths = 0
    while True:
        try:
            crank.run()
        except ExecutorDiedError:
            num_deaths += 1
            assert num_deaths <= max_deaths
            crank.restart_executor()
            crank.scheduler.check_integrity()
        else:
            return num_deaths


def undisturbed(prompts: dict[str, str]) -> dict[str, list[int]]:
    crank = cranked()
    for request_id, prompt in prompts.items():
        crank.add(prompt, max_tokens=30, request_id=request_id)
    crank.run()
    return {request_id: crank.tokens(request_id) for request_id in prompts}


@pytest.mark.parametrize("plan_delay", [0, 1])
@pytest.mark.parametrize("num_tokens_before", [0, 1, 12], ids=["in prefill", "at its second token", "in decode"])
@pytest.mark.parametrize("poisonous", [{"r3"}, {"r0", "r5"}, {f"r{i}" for i in range(8)}])
def test_poison_fails_alone(plan_delay, num_tokens_before, poisonous):
    prompts = {f"r{i}": f"prompt of {i} " * (i + 1) for i in range(8)}
    crank = cranked(plan_delay=plan_delay)

    def is_deadly(seat) -> bool:
        num_answered = len(seat.token_ids) - seat.num_prompt_tokens
        return seat.request_id in poisonous and num_answered >= num_tokens_before

    make_deadly(crank, is_deadly)
    for request_id, prompt in prompts.items():
        crank.add(prompt, max_tokens=30, request_id=request_id)
    run_with_deaths(crank, max_deaths=3 * len(poisonous))
    expected = undisturbed(prompts)
    for request_id in prompts:
        finish = crank.finish(request_id)
        if request_id in poisonous:
            assert finish.reason is FinishReason.FAILED
            assert "executors were lost in 3 attempts" in finish.message
            assert crank.tokens(request_id) == expected[request_id][:num_tokens_before]
        else:
            assert finish.reason is FinishReason.LENGTH
            assert crank.tokens(request_id) == expected[request_id]
    assert crank.scheduler.num_used_blocks == 0


def test_deaths_that_nobody_is_to_blame_for_give_nobody_up():
    """The executor dies again and again, but everybody gets a little further each time."""
    prompts = {f"r{i}": f"prompt {i} " * 5 for i in range(6)}
    crank = cranked(plan_delay=1)
    for request_id, prompt in prompts.items():
        crank.add(prompt, max_tokens=30, request_id=request_id)
    for _ in range(20):
        for _ in range(4):
            crank.step()
        crank.restart_executor()
    crank.run()
    expected = undisturbed(prompts)
    assert {request_id: crank.tokens(request_id) for request_id in prompts} == expected


def test_a_long_prefill_gets_further_by_its_chunks():
    """Deaths before the first token count only as long as no new part of the prompt was computed."""
    crank = cranked(max_prefill_chunk=8)
    request_id = crank.add("x" * 80, max_tokens=2)
    for num_chunks in range(1, 10):
        for _ in range(num_chunks):
            crank.step()
        crank.restart_executor()
    crank.run()
    assert crank.finish(request_id).reason is FinishReason.LENGTH


def test_an_executor_that_leaves_in_good_order_is_no_loss():
    crank = cranked(plan_delay=1)
    request_id = crank.add("patience", max_tokens=2)
    for epoch in range(100, 110):
        crank.scheduler.schedule(0.0)
        assert crank.scheduler.reset(epoch, is_loss=False) == []
    assert request_id in crank.scheduler.requests
