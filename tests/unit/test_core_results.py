"""What results bring, what a lost executor costs, and that garbage changes nothing."""

import copy
from dataclasses import replace

import pytest

from everystop.plan import SamplingParams, SequenceFailure, SequenceLogprobs, StepPlan, StepResult
from scheduler_svc.core import CoreConfig, FinishReason, Request, ResultMismatchError, Scheduler


def make_core(**changes: int) -> Scheduler:
    limits = {
        "block_size": 4,
        "num_blocks": 16,
        "vocab_size": 100,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "max_prefill_chunk": 4,
    }
    return Scheduler(CoreConfig(**{**limits, **changes}, watermark=0.0), epoch=7)


def make_request(request_id: str, num_prompt_tokens: int = 3, max_tokens: int = 9, **sampling: int) -> Request:
    return Request(request_id, list(range(10, 10 + num_prompt_tokens)), SamplingParams(**sampling), max_tokens)  # type: ignore[arg-type]


def schedule(core: Scheduler, now: float = 0.0) -> StepPlan:
    plan = core.schedule(now)
    assert plan is not None
    return plan


def rows(slot: int, token_ids: list[int], *, is_prompt: bool, num_top: int = 2) -> SequenceLogprobs:
    logprobs = [-token_id / 10 for token_id in token_ids]
    top_token_ids = [token_id + i for token_id in token_ids for i in range(num_top)]
    return SequenceLogprobs(
        slot, is_prompt, token_ids, logprobs, num_top, top_token_ids, [-token_id / 10 for token_id in top_token_ids]
    )


def test_times_and_counts_are_told_at_the_end() -> None:
    core = make_core()
    core.add(make_request("a", num_prompt_tokens=6, max_tokens=2), now=1.0)
    first, second, third = schedule(core, now=2.0), schedule(core, now=3.0), schedule(core, now=4.0)
    assert core.apply(StepResult(first.step_id, []), now=5.0) == []
    core.apply(StepResult(second.step_id, [50]), now=6.0)
    (output,) = core.apply(StepResult(third.step_id, [51]), now=7.0)
    assert output.finish is not None
    stats = output.finish.stats
    assert (stats.arrival_time, stats.first_scheduled_time, stats.first_token_time) == (1.0, 2.0, 6.0)
    counters = core.counters
    assert (counters.num_steps, counters.num_prompt_tokens, counters.num_output_tokens) == (3, 6, 2)
    counters.num_steps = 0
    assert core.counters.num_steps == 3


def test_failure_ends_one_request_alone() -> None:
    core = make_core()
    core.add(make_request("a"), now=0.0)
    core.add(make_request("b"), now=0.0)
    first, second = schedule(core), schedule(core)
    failed, output = core.apply(
        StepResult(first.step_id, [0, 51], failures=[SequenceFailure(0, "not finite")]), now=0.0
    )
    assert (failed.request.request_id, failed.token_ids) == ("a", [])
    assert failed.finish is not None
    assert (failed.finish.reason, failed.finish.message) == (FinishReason.FAILED, "not finite")
    assert (output.request.request_id, output.token_ids) == ("b", [51])
    # Its next token, and its next failure, find nobody.
    (output,) = core.apply(StepResult(second.step_id, [0, 52], failures=[SequenceFailure(0, "not finite")]), now=0.0)
    assert output.request.request_id == "b"
    assert schedule(core).exit_slots == [0]
    core.check_integrity()


def test_prefill_can_fail_before_it_samples() -> None:
    core = make_core()
    core.add(make_request("a", num_prompt_tokens=8, num_prompt_logprobs=2), now=0.0)
    plan = schedule(core)
    (failed,) = core.apply(StepResult(plan.step_id, [], failures=[SequenceFailure(0, "not finite")]), now=0.0)
    assert failed.finish is not None
    assert core.num_used_blocks == 0


def test_logprobs_come_with_their_token() -> None:
    core = make_core()
    core.add(make_request("a", num_logprobs=2), now=0.0)
    core.add(make_request("b"), now=0.0)
    plan = schedule(core)
    entry = rows(0, [50], is_prompt=False)
    outputs = core.apply(StepResult(plan.step_id, [50, 51], logprobs=[entry]), now=0.0)
    assert [output.logprobs for output in outputs] == [entry, None]


def test_one_that_failed_may_send_logprobs_or_not() -> None:
    failure = SequenceFailure(0, "not finite")
    for entries in ([], [rows(0, [99], is_prompt=False)]):
        core = make_core()
        core.add(make_request("a", num_logprobs=2), now=0.0)
        schedule(core)
        (output,) = core.apply(StepResult(1, [0], logprobs=entries, failures=[failure]), now=0.0)
        assert output.logprobs is None


def test_prompt_logprobs_may_come_in_pieces() -> None:
    core = make_core()
    core.add(make_request("a", num_prompt_tokens=4, num_prompt_logprobs=2), now=0.0)
    schedule(core)
    pieces = [rows(0, [11, 12], is_prompt=True), rows(0, [13], is_prompt=True)]
    (output,) = core.apply(StepResult(1, [50], logprobs=pieces), now=0.0)
    assert output.prompt_logprobs == pieces


def test_there_are_no_more_alternatives_than_the_vocabulary_has_tokens() -> None:
    core = make_core(vocab_size=20)
    core.add(make_request("a", num_prompt_tokens=4, num_logprobs=25, num_prompt_logprobs=25), now=0.0)
    schedule(core)
    sampled = SequenceLogprobs(0, False, [5], [-1.0], 20, list(range(20)), [-3.0] * 20)
    prompt = SequenceLogprobs(0, True, [11, 12, 13], [-1.0] * 3, 20, [*range(20)] * 3, [-3.0] * 60)
    (output,) = core.apply(StepResult(1, [5], logprobs=[sampled, prompt]), now=0.0)
    assert (output.logprobs, output.prompt_logprobs) == (sampled, [prompt])


def test_prompt_logprobs_come_once_though_the_prompt_is_computed_again() -> None:
    core = make_core()
    core.add(make_request("a", num_prompt_tokens=7, num_prompt_logprobs=2), now=0.0)
    plan = schedule(core)
    (output,) = core.apply(StepResult(1, [], logprobs=[rows(0, [11, 12, 13, 14], is_prompt=True)]), now=0.0)
    assert output.token_ids == []
    assert output.prompt_logprobs == [rows(0, [11, 12, 13, 14], is_prompt=True)]
    core.reset(epoch=8)
    core.add(make_request("b", num_prompt_tokens=6), now=0.0)
    plan = schedule(core)
    assert plan.chunk_num_tokens == [4, 4]
    assert core.apply(StepResult(1, [], logprobs=[rows(0, [11, 12, 13, 14], is_prompt=True)]), now=0.0) == []
    schedule(core)
    result = StepResult(2, [50, 51], logprobs=[rows(0, [15, 16], is_prompt=True)])
    first, second = core.apply(result, now=0.0)
    assert (first.token_ids, first.prompt_logprobs) == ([50], [rows(0, [15, 16], is_prompt=True)])
    assert second.prompt_logprobs == []


def test_prompt_logprobs_are_cut_where_an_earlier_attempt_stopped() -> None:
    core = make_core(max_num_batched_tokens=5)
    core.add(make_request("other", num_prompt_tokens=3), now=0.0)
    core.add(make_request("a", num_prompt_tokens=7, num_prompt_logprobs=1), now=0.0)
    schedule(core)
    entry = rows(1, [11, 12], is_prompt=True, num_top=1)
    core.apply(StepResult(1, [50], logprobs=[entry]), now=0.0)
    core.finish("other")
    core.reset(epoch=8)
    assert schedule(core).chunk_num_tokens == [4]
    entry = rows(0, [11, 12, 13, 14], is_prompt=True, num_top=1)
    (output,) = core.apply(StepResult(1, [], logprobs=[entry]), now=0.0)
    assert output.prompt_logprobs == [rows(0, [13, 14], is_prompt=True, num_top=1)]


def test_lost_executor_loses_no_request_and_no_token() -> None:
    core = make_core(max_num_seqs=2)
    for request_id in ("a", "b", "c"):
        core.add(make_request(request_id, max_tokens=2), now=0.0)
    schedule(core)
    core.apply(StepResult(1, [50, 60]), now=0.0)
    schedule(core)  # the last tokens of "a" and "b"
    schedule(core)  # so they have left, and "c" has boarded
    assert core.reset(epoch=8) == []
    core.check_integrity()
    assert (core.num_running, core.num_waiting, core.num_in_flight_steps, core.num_used_blocks) == (0, 3, 0, 0)
    plan = schedule(core, now=1.0)
    assert (plan.step_id, plan.epoch, plan.exit_slots) == (1, 8, [])
    assert [(s.request_id, s.attempt, s.token_ids[3:]) for s in plan.admissions] == [("a", 2, [50]), ("b", 2, [60])]
    outputs = core.apply(StepResult(1, [51, 61]), now=1.0)
    assert [(output.token_ids, output.finish is not None) for output in outputs] == [([51], True), ([61], True)]
    assert core.counters.num_recomputed_tokens == 4 + 4 + 3
    assert outputs[0].finish is not None
    stats = outputs[0].finish.stats
    assert (stats.num_recomputed_tokens, stats.num_preemptions) == (4, 0)
    assert (stats.first_scheduled_time, stats.first_token_time) == (0.0, 0.0)
    assert core.counters.num_prompt_tokens == 9


def test_smaller_executor_fails_what_no_longer_fits() -> None:
    core = make_core()
    core.add(make_request("large", num_prompt_tokens=20), now=0.0)
    core.add(make_request("small"), now=0.0)
    schedule(core)
    (output,) = core.reset(epoch=8, num_blocks=6)
    assert output.request.request_id == "large"
    assert output.finish is not None
    assert output.finish.reason is FinishReason.FAILED
    assert "need 7 KV blocks of 6" in output.finish.message
    assert (core.config.num_blocks, set(core.requests)) == (6, {"small"})
    assert [admission.request_id for admission in schedule(core).admissions] == ["small"]
    core.check_integrity()


PROMPT_ROWS = rows(2, [11, 12, 13, 14], is_prompt=True)
SAMPLED_ROWS = rows(1, [51], is_prompt=False)
GOOD = StepResult(1, [50, 51], logprobs=[SAMPLED_ROWS, PROMPT_ROWS])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (replace(GOOD, step_id=2), "result of step 2, but the oldest in flight is 1"),
        (replace(GOOD, token_ids=[50]), "1 tokens from 2 sequences"),
        (replace(GOOD, token_ids=[50, 51, 52]), "3 tokens from 2 sequences"),
        (replace(GOOD, token_ids=[100, 51]), "token 100 is not in the vocabulary of 100"),
        (replace(GOOD, token_ids=[-1, 51]), "token -1 is not in the vocabulary"),
        (replace(GOOD, failures=[SequenceFailure(3, "")]), r"slots \[3\] fail, but have no part"),
        (replace(GOOD, failures=[SequenceFailure(0, ""), SequenceFailure(0, "")]), "fails twice"),
        (replace(GOOD, logprobs=[PROMPT_ROWS]), r"logprobs of slots \[1\] are missing"),
        (replace(GOOD, logprobs=[SAMPLED_ROWS]), r"logprobs of slots \[2\] are missing"),
        (replace(GOOD, logprobs=[*GOOD.logprobs, SAMPLED_ROWS]), "sampled logprobs of slot 1 .* came twice"),
        (replace(GOOD, logprobs=[*GOOD.logprobs, rows(0, [50], is_prompt=False)]), "slot 0 were not asked for"),
        (replace(GOOD, logprobs=[SAMPLED_ROWS, replace(PROMPT_ROWS, slot=3)]), "prompt logprobs of slot 3 were not"),
        (replace(GOOD, logprobs=[replace(SAMPLED_ROWS, token_ids=[50]), PROMPT_ROWS]), "about other tokens"),
        (replace(GOOD, logprobs=[SAMPLED_ROWS, rows(2, [11, 12, 14], is_prompt=True)]), "about other tokens"),
        (replace(GOOD, logprobs=[SAMPLED_ROWS, rows(2, [], is_prompt=True), PROMPT_ROWS]), "about other tokens"),
        (replace(GOOD, logprobs=[SAMPLED_ROWS, rows(2, [11, 12, 13], is_prompt=True)]), r"slots \[2\] are missing"),
        (replace(GOOD, logprobs=[replace(SAMPLED_ROWS, logprobs=[]), PROMPT_ROWS]), "wrong shape"),
        (replace(GOOD, logprobs=[replace(SAMPLED_ROWS, num_top=1), PROMPT_ROWS]), "1 alternatives of 2"),
        (replace(GOOD, logprobs=[replace(SAMPLED_ROWS, top_logprobs=[]), PROMPT_ROWS]), "wrong shape"),
        (replace(GOOD, logprobs=[replace(SAMPLED_ROWS, num_top=-1), PROMPT_ROWS]), "-1 alternatives of 2"),
        (replace(GOOD, logprobs=[rows(1, [51], is_prompt=False, num_top=3), PROMPT_ROWS]), "3 alternatives of 2"),
        (replace(GOOD, logprobs=[rows(1, [51], is_prompt=False, num_top=0), PROMPT_ROWS]), "0 alternatives of 2"),
        (
            replace(GOOD, logprobs=[SAMPLED_ROWS, rows(2, [11, 12, 13, 14], is_prompt=True, num_top=1)]),
            "1 alternatives of 2",
        ),
        (
            replace(GOOD, logprobs=[replace(SAMPLED_ROWS, top_token_ids=[51, 100]), PROMPT_ROWS]),
            "token 100 is not in the vocabulary",
        ),
    ],
)
def test_garbage_is_refused_and_changes_nothing(result: StepResult, message: str) -> None:
    core = make_core()
    core.add(make_request("a"), now=0.0)
    core.add(make_request("b", num_logprobs=2), now=0.0)
    core.add(make_request("c", num_prompt_tokens=6, num_prompt_logprobs=2), now=0.0)
    schedule(core)
    schedule(core)
    untouched = copy.deepcopy(core)
    with pytest.raises(ResultMismatchError, match=message):
        core.apply(result, now=0.0)
    core.check_integrity()
    assert core.counters == untouched.counters
    outputs, expected = core.apply(GOOD, now=0.0), untouched.apply(GOOD, now=0.0)
    assert len(outputs) == 3
    assert repr(outputs) == repr(expected)
    assert core.schedule(now=0.0) == untouched.schedule(now=0.0)


def test_result_without_a_plan_is_refused() -> None:
    with pytest.raises(ResultMismatchError, match="no step is in flight"):
        make_core().apply(StepResult(1, []), now=0.0)
