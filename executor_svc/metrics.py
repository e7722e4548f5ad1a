"""The executor's Prometheus metrics: read from the engine when somebody scrapes, in the thread of the scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from everystop.metrics import Families
from executor_svc.backend import BackendInfo
from executor_svc.engine import Engine


class ExecutorCollector(Collector):
    """Every sample is labelled with the model's name."""

    def __init__(self, engine: Engine, info: BackendInfo) -> None:
        self._engine = engine
        self._info = info

    def collect(self) -> Iterator[Metric]:
        """What the engine knows at this moment."""
        info, stats = self._info, self._engine.stats
        make = Families({"model_name": info.model.name})
        computing = {"backend": info.name, "device": info.device, "dtype": info.dtype}
        yield Families({"model_name": info.model.name, **computing}).gauge("executor_info", "Always 1.", 1)
        yield make.gauge("executor_num_seqs", "Sequences that are seated, as of the last plan.", self._engine.num_seqs)
        yield make.gauge("executor_num_blocks", "Blocks of the KV cache, used or not.", info.num_blocks)
        yield make.counter("executor_sessions", "Schedulers that shook hands.", stats.num_sessions)
        yield make.counter("executor_steps", "Steps that were computed.", stats.num_steps)
        yield make.counter("executor_step_tokens", "Tokens that were computed.", stats.num_tokens)
        yield make.counter("executor_steps_failed", "Steps in which the backend raised.", stats.num_failed_steps)
        yield make.counter_by(
            "reason", "executor_plans_refused", "Plans that were not executed, by reason.", dict(stats.refusals)
        )
        yield make.counter(
            "executor_waited_seconds", "Without a plan, whether there was work or not.", stats.waited_us / 1e6
        )
        yield make.counter("executor_forward_seconds", "In the forward pass.", stats.forward_us / 1e6)
        yield make.counter("executor_sample_seconds", "In sampling.", stats.sample_us / 1e6)
        yield make.histogram("executor_step_time_seconds", "Forward pass and sampling of a step.", stats.step_time)
