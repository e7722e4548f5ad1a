"""What is scraped over HTTP, beside what really happened."""

import asyncio
import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from everystop.client import AsyncClient, Client, Delta
from everystop.errors import ServiceError
from everystop.testing import serve_mock

ON_A_FREE_PORT = "127.0.0.1:0"
ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy" / "grafana-dashboard.json"
GUIDE = ROOT / "docs" / "operations.md"


def fetch(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        return response.read().decode()


class Scrape:
    """Samples of one scrape, by name without the prefix."""

    def __init__(self, address: str) -> None:
        self.samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(fetch(address)):
            for sample in family.samples:
                self.samples.setdefault(sample.name.removeprefix("everystop:"), []).append(
                    (sample.labels, sample.value)
                )

    def __call__(self, name: str, **labels: str) -> float:
        """The one sample that has these labels."""
        (value,) = [value for own, value in self.samples[name] if own.items() >= labels.items()]
        return value


@pytest.fixture
def service():
    with serve_mock(metrics_listen=ON_A_FREE_PORT, max_waiting=4, max_num_seqs=2) as running:
        yield running


def settled(client: Client, service):
    """Counters and metrics once no step is on its way any more."""
    while True:
        status, seen = client.get_status(), Scrape(service.metrics_address)
        if status.num_running == 0 and status.counters.num_steps == seen("iteration_tokens_total_count"):
            return status.counters, seen


def test_requests_of_every_kind_of_end(service) -> None:
    started = time.monotonic()
    with Client(service.address, retry=None) as client:
        answers = [client.complete("hello", max_tokens=num, temperature=0.0, ignore_eos=True) for num in (1, 5, 30)]
        stop_strings = [answers[2].text[3]]
        stopped = client.complete("hello", max_tokens=30, temperature=0.0, ignore_eos=True, stop_strings=stop_strings)
        cancelled = client.generate("hello", max_tokens=3000, ignore_eos=True)
        next(event for event in cancelled if isinstance(event, Delta))
        cancelled.close()
        for options in ({"max_tokens": 0}, {"max_tokens": 1, "request_id": ""}):
            with pytest.raises(ServiceError):
                client.complete("hello", **options)
        counters, seen = settled(client, service)
    elapsed_s = time.monotonic() - started

    for reason, num_requests in {"length": 3, "stop": 1, "abort": 1, "error": 0}.items():
        assert seen("request_success_total", finished_reason=reason, model_name="mock") == num_requests
    assert seen("request_refused_total", reason="INVALID_FIELD") == 2
    assert seen("request_refused_total", reason="QUEUE_FULL") == 0

    # Of the four that are complete: 5 prompt tokens each, and what they were answered.
    num_output_tokens = [len(answer.token_ids) for answer in (*answers, stopped)]
    assert seen("request_prompt_tokens_sum") == 20
    assert seen("request_generation_tokens_sum") == sum(num_output_tokens)
    assert seen("request_params_max_tokens_sum") == 1 + 5 + 30 + 30
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    for name in (*parts, "request_inference_time", "e2e_request_latency"):
        assert seen(f"{name}_seconds_count") == 4
        assert seen(f"{name}_seconds_bucket", le="+Inf") == 4
    total_s = seen("e2e_request_latency_seconds_sum")
    assert 0 < total_s < elapsed_s
    assert sum(seen(f"{name}_seconds_sum") for name in parts) == pytest.approx(total_s)
    server_ms = sum(answer.timings.total_ms for answer in (*answers, stopped))
    assert total_s == pytest.approx(server_ms / 1000, rel=0.2)

    # Of all five: each has a first token, and an interval before each other one.
    assert seen("time_to_first_token_seconds_count") == 5
    assert seen("prompt_tokens_total") == 25
    assert seen("generation_tokens_total") == counters.num_output_tokens
    assert seen("inter_token_latency_seconds_count") == counters.num_output_tokens - 5
    assert seen("inter_token_latency_seconds_sum") < elapsed_s

    # Of the steps.
    assert seen("iteration_tokens_total_count") == counters.num_steps
    assert seen("iteration_tokens_total_sum") >= 20 + sum(num_output_tokens) - 4
    assert (seen("plan_bytes_count"), seen("plan_bytes_sum")) == (counters.num_steps, counters.num_plan_bytes)
    assert 0 < seen("executor_busy_seconds_total") + seen("exposed_scheduling_seconds_total") < elapsed_s
    assert 0 <= seen("executor_idle_share") <= 1
    assert seen("process_resident_memory_bytes") > 1e6
    for name in ("prefix_cache_queries_total", "prefix_cache_hits_total", "executor_restarts_survived_total"):
        assert seen(name) == 0


def test_the_executor_tells_the_same_steps(service) -> None:
    with Client(service.address) as client:
        client.complete("hello", max_tokens=20, ignore_eos=True)
    scheduler, executor = Scrape(service.metrics_address), Scrape(service.executor_metrics_address)
    assert executor("executor_steps_total", model_name="mock") == scheduler("iteration_tokens_total_count") == 20
    assert executor("executor_step_tokens_total") == scheduler("iteration_tokens_total_sum")
    assert executor("executor_sessions_total") == 1
    assert executor("executor_steps_failed_total") == 0
    assert executor("executor_num_blocks") == 8192
    assert executor("executor_info", backend="mock") == 1
    assert executor("executor_step_time_seconds_count") == 20
    computed_s = executor("executor_forward_seconds_total") + executor("executor_sample_seconds_total")
    assert computed_s == pytest.approx(executor("executor_step_time_seconds_sum"))
    assert computed_s == pytest.approx(scheduler("executor_busy_seconds_total"))
    assert executor("executor_waited_seconds_total") >= scheduler("exposed_scheduling_seconds_total")


def test_a_full_house(service) -> None:
    async def scenario() -> Scrape:
        async with AsyncClient(service.address, retry=None) as client:
            streams = [client.generate("hello", max_tokens=3000, ignore_eos=True) for _ in range(6)]
            for stream in streams:
                await anext(stream)
            with pytest.raises(ServiceError):
                await client.complete("one too many", max_tokens=1)
            while (await client.get_status()).num_running < 2:
                pass
            seen = await asyncio.to_thread(Scrape, service.metrics_address)
            for stream in streams:
                await stream.aclose()
            return seen

    seen = asyncio.run(scenario())
    assert (seen("num_requests_running"), seen("num_requests_waiting")) == (2, 4)
    assert seen("num_tokens_waiting") == 4 * 5
    assert 0 < seen("kv_cache_usage_perc") < 1
    assert seen("request_refused_total", reason="QUEUE_FULL") == 1
    assert seen("executor_connected") == 1


def test_gauges_are_true_at_once_after_a_mass_cancel() -> None:
    async def scenario(service) -> tuple[Scrape, Scrape, float]:
        async with AsyncClient(service.address) as client:
            streams = [client.generate(f"stream {index}", max_tokens=3000, ignore_eos=True) for index in range(100)]
            for stream in streams:
                await anext(stream)
            while (await client.get_status()).num_running < 64:
                pass
            before = await asyncio.to_thread(Scrape, service.metrics_address)
            cancelled = time.monotonic()
            await asyncio.gather(*(stream.aclose() for stream in streams))
            while True:
                after = await asyncio.to_thread(Scrape, service.metrics_address)
                elapsed_s = time.monotonic() - cancelled
                if after("num_requests_running") + after("num_requests_waiting") == 0 or elapsed_s > 10:
                    return before, after, elapsed_s

    with serve_mock(metrics_listen=ON_A_FREE_PORT, mock_step_ms=5.0) as service:
        before, after, elapsed_s = asyncio.run(scenario(service))
    assert (before("num_requests_running"), before("num_requests_waiting")) == (64, 36)
    assert after("num_requests_running") == after("num_requests_waiting") == after("num_tokens_waiting") == 0
    assert after("kv_cache_usage_perc") == 0
    assert after("request_success_total", finished_reason="abort") == 100
    assert elapsed_s < 1.0


def test_preemptions_and_restarts() -> None:
    async def scenario(service) -> None:
        async with AsyncClient(service.address) as client:
            calls = [client.complete(f"number {index}", max_tokens=60, ignore_eos=True) for index in range(6)]
            answers = asyncio.gather(*calls)
            while (await client.get_status()).counters.num_preemptions == 0:
                pass
            await asyncio.to_thread(service.stop_executor)
            assert (await asyncio.to_thread(Scrape, service.metrics_address))("executor_connected") == 0
            await asyncio.to_thread(service.start_executor)
            await answers

    with serve_mock(metrics_listen=ON_A_FREE_PORT, num_blocks=12, block_size=8, mock_step_ms=2.0) as service:
        asyncio.run(scenario(service))
        seen = Scrape(service.metrics_address)
        with Client(service.address) as client:
            counters = client.get_status().counters
    assert seen("num_preemptions_total") == counters.num_preemptions > 0
    assert seen("recomputed_tokens_total") == counters.num_recomputed_tokens > 0
    assert seen("executor_restarts_survived_total") == 1
    assert seen("executor_connected") == 1
    assert seen("request_success_total", finished_reason="length") == 6


def test_failures_are_counted_on_both_sides() -> None:
    with serve_mock(metrics_listen=ON_A_FREE_PORT, mock_fail="garbage@3") as service, Client(service.address) as client:
        client.complete("hello", max_tokens=10, ignore_eos=True)
        scheduler, executor = Scrape(service.metrics_address), Scrape(service.executor_metrics_address)
    assert scheduler("executor_restarts_survived_total") == 1
    assert executor("executor_sessions_total") == 2


def test_without_an_executor_there_is_little_to_tell(unused_tcp_port: int) -> None:
    from everystop.settings import SchedulerConfig
    from scheduler_svc import server

    async def scenario() -> Scrape:
        config = SchedulerConfig(
            listen=ON_A_FREE_PORT, metrics_listen=ON_A_FREE_PORT, executor_address=f"127.0.0.1:{unused_tcp_port}"
        )
        running = await server.start(config)
        try:
            async with AsyncClient(running.address, retry=None) as client:
                with pytest.raises(ServiceError):
                    await client.complete("hello", max_tokens=1)
            return await asyncio.to_thread(Scrape, running.observers.metrics_address)
        finally:
            await running.stop()

    seen = asyncio.run(scenario())
    assert seen("executor_connected") == 0
    assert seen("request_refused_total", reason="NO_EXECUTOR") == 1
    assert "num_requests_running" not in seen.samples


def test_the_port_is_closed_at_the_end_and_a_taken_one_is_an_error() -> None:
    with serve_mock(metrics_listen=ON_A_FREE_PORT) as service:
        address = service.metrics_address
        with pytest.raises(OSError, match=f"cannot serve metrics on {address}"), serve_mock(metrics_listen=address):
            pass
    with pytest.raises(OSError, match="refused"):
        fetch(address)


def test_the_dashboard_uses_only_what_exists(service) -> None:
    with Client(service.address) as client:
        client.complete("hello", max_tokens=2)
    exists: dict[str, set[str]] = {}
    for address in (service.metrics_address, service.executor_metrics_address):
        for family in text_string_to_metric_families(fetch(address)):
            for sample in family.samples:
                exists.setdefault(sample.name, set()).update(sample.labels)
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    expressions += [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    assert len(expressions) > 15
    for expression in expressions:
        names = re.findall(r"\b(?:everystop:|process_)\w+", expression)
        assert names, expression
        assert set(names) <= exists.keys(), expression
        labels = set(re.findall(r"(\w+)\s*=~?\s*\"", expression)) | {
            label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", group)
        }
        assert labels - {"job", "instance"} <= set.union(*(exists[name] for name in names)), expression


def test_the_guide_lists_all_of_them(service) -> None:
    exists = {
        family.name: family.type
        for address in (service.metrics_address, service.executor_metrics_address)
        for family in text_string_to_metric_families(fetch(address))
        if family.name.startswith("everystop:")
    }
    listed: dict[str, str] = {}
    for line in GUIDE.read_text().splitlines():
        if line.startswith("| `everystop:"):
            _, names, kind, *_ = line.split("|")
            listed.update(dict.fromkeys(re.findall(r"everystop:\w+", names), kind.strip()))
    assert listed == exists
