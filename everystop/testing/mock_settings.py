"""Keyword arguments of the helpers to the configurations of both services."""

from __future__ import annotations

import dataclasses
from typing import Any

from everystop.settings import ExecutorConfig, SchedulerConfig

_CHOSEN_HERE = {
    *("listen", "executor_address", "address_file", "log_format", "log_level"),
    *("backend", "model", "dtype", "threads", "kv_cache_gib"),
}
_OF_THE_EXECUTOR = {"max_model_len"}
"""Of the settings that both have. The scheduler takes over what the executor says."""
_LIMITS = ("max_num_seqs", "max_num_batched_tokens")
"""Of the settings that both have: the scheduler's knobs, which the executor's limits must not be below."""
_OF_EACH = {"metrics_listen", "otlp_endpoint"}
"""Of the settings that both have: given to both."""


def mock_settings(settings: dict[str, Any]) -> tuple[SchedulerConfig, ExecutorConfig]:
    """The configurations for a scheduler and a mock executor on free ports of the loopback interface.

    Raises:
        TypeError: a setting that neither service has, or that is not for the caller to choose.
        ConfigError: a value that is out of its range.

    """
    of_scheduler, of_executor = _names(SchedulerConfig) - _OF_THE_EXECUTOR, _names(ExecutorConfig)
    unknown = settings.keys() - (of_scheduler | of_executor)
    if unknown:
        known = ", ".join(sorted(of_scheduler | of_executor))
        raise TypeError(f"no setting {', '.join(sorted(unknown))} (settings: {known})")
    scheduler = SchedulerConfig(
        listen="127.0.0.1:0", **{name: value for name, value in settings.items() if name in of_scheduler}
    )
    limits = {name: max(getattr(ExecutorConfig(), name), getattr(scheduler, name)) for name in _LIMITS}
    own = {name: value for name, value in settings.items() if name in of_executor - of_scheduler | _OF_EACH}
    return scheduler, ExecutorConfig(listen="127.0.0.1:0", backend="mock", **limits, **own)


def _names(config_type: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(config_type)} - _CHOSEN_HERE
