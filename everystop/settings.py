"""Every setting of the two services, each declared once."""

from __future__ import annotations

from dataclasses import dataclass

from everystop.options import ConfigError, check, option

_MAX_SEQS = 65_536
MAX_TOKENS = 2**24
MAX_BLOCKS = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What both services have."""

    address_file: str = option("", help="Write the bound host:port to this file once the service listens.")
    log_format: str = option(
        "auto", choices=("auto", "json", "console"), help="How log lines look; auto: console on a terminal, else json."
    )
    log_level: str = option("info", choices=("debug", "info", "warning", "error"), help="Least severe lines to log.")
    metrics_listen: str = option("", help="host:port to serve Prometheus metrics on; none when empty.")
    otlp_endpoint: str = option(
        "", help="URL of an OpenTelemetry collector (OTLP over gRPC) to send traces to; none when empty."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(ServiceConfig):
    """The scheduler: whom it serves and how it fills a step."""

    listen: str = option("127.0.0.1:50051", help="host:port to serve clients on; port 0 takes a free one.")
    executor_address: str = option("127.0.0.1:50052", help="host:port of the executor.")
    max_num_seqs: int = option(64, min=1, max=_MAX_SEQS, help="Most sequences that run at once.")
    max_num_batched_tokens: int = option(512, min=1, max=MAX_TOKENS, help="Most tokens to compute in one step.")
    max_model_len: int | None = option(
        None, min=2, max=MAX_TOKENS, help="Most tokens of prompt and answer together; the executor's when left out."
    )
    max_prefill_chunk: int = option(256, min=1, max=MAX_TOKENS, help="Most tokens of one prompt in one step.")
    watermark: float = option(0.01, min=0.0, max=0.9, help="Share of the KV blocks that admission leaves free.")
    policy: str = option("fcfs", choices=("fcfs", "priority"), help="Who is served first, and who is preempted.")
    batching: str = option(
        "continuous",
        choices=("continuous", "static"),
        help="continuous: sequences come and go at every step; static: a batch stays until its longest one ends.",
    )
    max_waiting: int = option(4096, min=1, max=1_000_000, help="Most requests that wait; more are refused.")
    max_waiting_tokens: int = option(
        4_000_000, min=1, max=2**40, help="Most tokens of requests that wait; more are refused."
    )
    max_wait_s: float | None = option(
        None, min=0.001, max=1e9, help="Seconds that a request may wait for its first step; no limit when left out."
    )
    max_request_s: float | None = option(
        None, min=0.001, max=1e9, help="Seconds that a request may take in all; no limit when left out."
    )
    max_unread_s: float = option(
        60.0, min=0.001, max=1e9, help="Seconds that an answer may wait, in all, for its client to read; then it ends."
    )
    step_timeout_s: float = option(
        60.0, min=0.01, max=1e6, help="Seconds that a step may take before its executor is given up as hung."
    )
    max_losses: int = option(
        5, min=1, max=1000, help="Executors that a request may lose at the same step before it is given up."
    )
    unready_after_s: float = option(
        3.0, min=0.0, max=1e6, help="Seconds without an executor after which health says NOT_SERVING."
    )
    drain_grace_s: float = option(
        30.0, min=0.0, max=1e6, help="Seconds that running requests have to finish at a drain (SIGTERM)."
    )

    def __post_init__(self) -> None:
        check(self)
        check_address("--listen", self.listen)
        check_address("--executor-address", self.executor_address)
        _check_observers(self)
        _check_budget(self.max_num_batched_tokens, self.max_num_seqs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig(ServiceConfig):
    """The executor: the model, its KV cache and its limits."""

    listen: str = option("127.0.0.1:50052", help="host:port to serve the scheduler on; port 0 takes a free one.")
    backend: str = option(
        "auto",
        choices=("auto", "cpu", "mock"),
        help="What computes; auto: the best this machine has. mock needs no model.",
    )
    model: str = option("default", help="Hugging Face id, folder or GGUF file; default: SmolLM2-135M-Instruct.")
    dtype: str = option(
        "auto",
        choices=("auto", "float32", "bfloat16"),
        help="Data type of weights and KV cache; auto: bfloat16 if the CPU has instructions for it, else float32.",
    )
    block_size: int = option(16, min=1, max=1024, help="Tokens per KV block.")
    kv_cache_gib: float = option(1.0, min=0.001, max=65_536.0, help="Memory for the KV cache in GiB.")
    num_blocks: int | None = option(
        None, min=1, max=MAX_BLOCKS, help="Number of KV blocks; in place of --kv-cache-gib when given."
    )
    max_model_len: int | None = option(
        None,
        min=2,
        max=MAX_TOKENS,
        help="Most tokens of one sequence; when left out, what the model and the cache hold.",
    )
    max_num_seqs: int = option(256, min=1, max=_MAX_SEQS, help="Most sequences that a scheduler may run at once.")
    max_num_batched_tokens: int = option(
        8192, min=1, max=MAX_TOKENS, help="Most tokens that a scheduler may put into one step."
    )
    threads: int = option(0, min=0, max=4096, help="Threads that compute; 0: one on each core.")
    step_timeout_s: float = option(
        60.0, min=0.01, max=1e6, help="Seconds that a step may take before this process ends itself as hung."
    )
    mock_step_ms: float = option(1.0, min=0.0, max=600_000.0, help="Mock: milliseconds that every step takes.")
    mock_token_us: float = option(0.0, min=0.0, max=1e6, help="Mock: microseconds that every token of a step adds.")
    mock_eos_rate: float = option(0.0, min=0.0, max=1.0, help="Mock: probability that a token ends its sequence.")
    mock_fail: str = option("", help='Mock: failures on demand, such as "die@40,hang@80,slow@20:500".')

    def __post_init__(self) -> None:
        check(self)
        check_address("--listen", self.listen)
        _check_observers(self)
        _check_budget(self.max_num_batched_tokens, self.max_num_seqs)


SECTIONS: dict[str, type[ServiceConfig]] = {"scheduler": SchedulerConfig, "executor": ExecutorConfig}
"""Sections of the TOML file; each has the settings of its class."""


def check_address(flag: str, address: str) -> None:
    """Raise `ConfigError` unless `address` is host:port, where an IPv6 host stands in brackets."""
    host, colon, port = address.rpartition(":")
    bare_ipv6 = ":" in host and not host.startswith("[")
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) <= 65_535) or bare_ipv6:
        raise ConfigError(f"{flag}: {address!r} is not host:port with a port from 0 to 65535")


def _check_observers(config: ServiceConfig) -> None:
    if config.metrics_listen:
        check_address("--metrics-listen", config.metrics_listen)
    if config.otlp_endpoint and not config.otlp_endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-endpoint: {config.otlp_endpoint!r} is not a URL that begins with http:// or https://"
        )


def _check_budget(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    # Every running sequence decodes one token in every step.
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({max_num_batched_tokens}) must be at least --max-num-seqs ({max_num_seqs})"
        )
