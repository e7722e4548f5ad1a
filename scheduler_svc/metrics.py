"""The scheduler's Prometheus metrics: read from the loop when somebody scrapes, in the thread of the scrape.

Names are those that dashboards for LLM serving know, with the prefix `everystop:`. Nothing is copied in advance, so
every scrape sees the core as it is; each read is one that a thread may do beside the event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from everystop.metrics import Families
from scheduler_svc.core.roster import Counters
from scheduler_svc.ledger import Ledger
from scheduler_svc.loop import Loop
from scheduler_svc.stats import StepStats

_FINISHED_REASONS = {
    "eos": "stop",
    "stop_token": "stop",
    "stop_string": "stop",
    "length": "length",
    "cancelled": "abort",
    "slow_reader": "abort",
}
"""What dashboards call the reasons of the log line; all others are "error"."""


class SchedulerCollector(Collector):
    """Samples are labelled with the model's name, and so begin with the first executor."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """What the loop knows at this moment."""
        model, core = self._loop.model, self._loop.core
        make = Families(None if model is None else {"model_name": model.executor.model.name})
        is_connected = self._loop.link is not None
        yield Families({}).gauge("executor_connected", "1 while an executor is connected, else 0.", int(is_connected))
        yield from self._gauges(make)
        yield from _work(make, Counters() if core is None else core.counters)
        yield from _steps(make, self._loop.stats)
        yield from _requests(make, self._loop.desk.ledger)
        yield from _latencies(make, self._loop.desk.ledger)

    def _gauges(self, make: Families) -> Iterator[Metric]:
        core = self._loop.core
        num_running, num_waiting, num_tokens, usage = 0, 0, 0, 0.0
        if core is not None:
            num_running, num_waiting, num_tokens = core.num_running, core.num_waiting, core.num_waiting_tokens
            usage = core.num_used_blocks / core.config.num_blocks
        yield make.gauge("num_requests_running", "Requests that have a seat.", num_running)
        yield make.gauge("num_requests_waiting", "Requests in line for a seat.", num_waiting)
        yield make.gauge("num_tokens_waiting", "Tokens of the requests in line.", num_tokens)
        yield make.gauge("kv_cache_usage_perc", "Share of the KV blocks in use, from 0 to 1.", usage)
        yield make.gauge(
            "executor_idle_share",
            "Share of the executor's time, from 0 to 1 over the last steps, without a plan although there was work.",
            self._loop.stats.executor_idle_share,
        )


def _work(make: Families, counters: Counters) -> Iterator[Metric]:
    yield make.counter("prompt_tokens", "Prompt tokens of requests that were seated.", counters.num_prompt_tokens)
    yield make.counter("generation_tokens", "Tokens that were generated.", counters.num_output_tokens)
    yield make.counter("num_preemptions", "Times that a request lost its seat.", counters.num_preemptions)
    yield make.counter(
        "recomputed_tokens",
        "Tokens computed for nothing because of a preemption or a lost executor.",
        counters.num_recomputed_tokens,
    )
    # There is no prefix cache: nothing is looked up, and so nothing is found. The names are here for dashboards.
    yield make.counter("prefix_cache_queries", "Prompt tokens looked up in a prefix cache; there is none yet.", 0)
    yield make.counter("prefix_cache_hits", "Prompt tokens found in a prefix cache; there is none yet.", 0)


def _steps(make: Families, stats: StepStats) -> Iterator[Metric]:
    yield make.histogram("iteration_tokens_total", "Tokens computed in a step.", stats.step_tokens)
    yield make.histogram("plan_bytes", "Size of a step plan on the wire.", stats.plan_bytes)
    yield make.counter("executor_busy_seconds", "The executor computed.", stats.busy_us / 1e6)
    yield make.counter(
        "exposed_scheduling_seconds", "The executor had no plan although there was work.", stats.exposed_us / 1e6
    )
    yield make.counter(
        "executor_restarts_survived", "Executors that came after the first.", max(0, stats.num_connections - 1)
    )


def _requests(make: Families, ledger: Ledger) -> Iterator[Metric]:
    outcomes: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
    for reason, num_requests in dict(ledger.outcomes).items():
        outcomes[_FINISHED_REASONS.get(reason, "error")] += num_requests
    yield make.counter_by("finished_reason", "request_success", "Requests that ended, by reason.", outcomes)
    # Without the model's name: there may be none yet, which is a reason, too.
    refusals = dict(ledger.refusals)
    yield Families({}).counter_by("reason", "request_refused", "Requests that never got in, by reason.", refusals)


def _latencies(make: Families, ledger: Ledger) -> Iterator[Metric]:
    seconds = ledger.latencies
    yield make.histogram("time_to_first_token_seconds", "From arrival to the first token.", seconds.first_token)
    yield make.histogram("inter_token_latency_seconds", "From one token to the next.", seconds.inter_token)
    complete = "of requests whose answer is complete."
    yield make.histogram("e2e_request_latency_seconds", f"From arrival to the end, {complete}", seconds.total)
    yield make.histogram("request_queue_time_seconds", f"From arrival to the first step, {complete}", seconds.queued)
    yield make.histogram("request_prefill_time_seconds", f"First step to first token, {complete}", seconds.prefill)
    yield make.histogram("request_decode_time_seconds", f"First token to end, {complete}", seconds.decode)
    yield make.histogram("request_inference_time_seconds", f"First step to end, {complete}", seconds.inference)
    yield make.histogram("request_prompt_tokens", f"Prompt tokens {complete}", seconds.num_prompt_tokens)
    yield make.histogram("request_generation_tokens", f"Generated tokens {complete}", seconds.num_output_tokens)
    yield make.histogram("request_params_max_tokens", f"The most tokens asked for, {complete}", seconds.max_tokens)
