import pytest

from everystop.plan import SamplingParams, StepTimings
from scheduler_svc.core.request import Request, RequestStats
from scheduler_svc.latencies import Latencies, TokenClock
from scheduler_svc.stats import WINDOW_STEPS, StepStats


def test_tokens_side_by_side_count_one_by_one() -> None:
    latencies = Latencies()
    early, late = TokenClock(arrival_time=1.0), TokenClock(arrival_time=2.0)
    latencies.tokens_arrived([early], now=3.0)
    latencies.tokens_arrived([early, late], now=4.0)
    latencies.tokens_arrived([early, late], now=4.5)
    assert (latencies.first_token.num_observations, latencies.first_token.total) == (2, 2.0 + 2.0)
    assert (latencies.inter_token.num_observations, latencies.inter_token.total) == (3, 1.0 + 0.5 + 0.5)


def test_a_complete_request_is_told_in_parts() -> None:
    latencies = Latencies()
    request = Request("a", [1, 2, 3], SamplingParams(), max_tokens=9)
    stats = RequestStats(arrival_time=1.0, first_scheduled_time=1.5, first_token_time=3.5)
    latencies.completed(request, stats, num_output_tokens=4, now=11.5)
    seconds = ("total", "queued", "prefill", "decode", "inference")
    tokens = ("num_prompt_tokens", "num_output_tokens", "max_tokens")
    totals = {name: getattr(latencies, name).total for name in (*seconds, *tokens)}
    assert totals == {
        "total": 10.5,
        "queued": 0.5,
        "prefill": 2.0,
        "decode": 8.0,
        "inference": 10.0,
        "num_prompt_tokens": 3,
        "num_output_tokens": 4,
        "max_tokens": 9,
    }


def test_a_request_without_a_step_of_its_own_has_no_parts() -> None:
    latencies = Latencies()
    request = Request("a", [1], SamplingParams(), max_tokens=9)
    latencies.completed(request, RequestStats(arrival_time=1.0), num_output_tokens=4, now=2.0)
    assert latencies.total.num_observations == 1
    assert latencies.queued.num_observations == latencies.decode.num_observations == 0


def test_the_idle_share_is_that_of_the_window() -> None:
    stats = StepStats()
    assert stats.executor_idle_share == 0.0
    for _ in range(WINDOW_STEPS):
        stats.received(StepTimings(waited_us=10, forward_us=20, sample_us=10), had_work=True)
    assert stats.executor_idle_share == pytest.approx(0.25)
    for _ in range(WINDOW_STEPS // 2):
        stats.received(StepTimings(waited_us=10, forward_us=20, sample_us=10), had_work=False)
    assert stats.executor_idle_share == pytest.approx(5 / 35)
    for _ in range(WINDOW_STEPS // 2):
        stats.received(StepTimings(waited_us=10, forward_us=20, sample_us=10), had_work=False)
    assert stats.executor_idle_share == 0.0
    assert (stats.exposed_us, stats.busy_us) == (10 * WINDOW_STEPS, 60 * WINDOW_STEPS)


def test_plans_are_counted_by_size_and_tokens() -> None:
    stats = StepStats()
    for num_bytes, num_tokens in ((10, 1), (20, 5), (90, 64)):
        stats.sent(num_bytes=num_bytes, num_tokens=num_tokens)
    assert (stats.num_plan_bytes, stats.plan_bytes_p50) == (120, 20)
    assert (stats.plan_bytes.total, stats.step_tokens.total) == (120, 70)
