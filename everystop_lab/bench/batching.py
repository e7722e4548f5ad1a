"""What continuous batching gives: the same service with `--batching continuous` and with `--batching static`."""

from __future__ import annotations

import asyncio
import statistics

import click

from everystop.client import AsyncClient
from everystop_lab import workload as workloads
from everystop_lab.bench.common import report, shared_options
from everystop_lab.load import LoadRun, closed_loop
from everystop_lab.service import serving

_NUM_PROMPT_TOKENS = 32
_LONGEST_TO_MEAN = 6
"""Answers longer than this many means are drawn again."""


@click.command
@click.option("--seqs", "max_num_seqs", type=click.IntRange(1, 4096), default=16, show_default=True, help="Batch size.")
@click.option("--requests", "num_requests", type=click.IntRange(1), default=64, show_default=True)
@click.option("--mean-tokens", type=click.IntRange(1), default=48, show_default=True, help="Mean length of an answer.")
@shared_options
def batching(
    max_num_seqs: int,
    num_requests: int,
    mean_tokens: int,
    backend: str,
    model: str,
    dtype: str,
    repeats: int,
    *,
    as_json: bool,
) -> None:
    """Continuous against static batching: all requests at once, answers of exponentially distributed length."""
    flags = [f"--executor={backend}", f"--model={model}", f"--dtype={dtype}", f"--max-num-seqs={max_num_seqs}"]
    figures = asyncio.run(_measure(flags, max_num_seqs, num_requests, mean_tokens, repeats))
    report(figures, as_json=as_json)


async def _measure(
    flags: list[str], max_num_seqs: int, num_requests: int, mean_tokens: int, repeats: int
) -> dict[str, float | int]:
    async with (
        serving([*flags, "--batching=continuous"]) as continuous_address,
        serving([*flags, "--batching=static"]) as static_address,
        AsyncClient(continuous_address) as continuous_client,
        AsyncClient(static_address) as static_client,
    ):
        vocab_size = (await continuous_client.get_model()).vocab_size
        items = workloads.exponential_outputs(
            num_requests,
            vocab_size,
            mean_tokens=mean_tokens,
            max_tokens=_LONGEST_TO_MEAN * mean_tokens,
            num_prompt_tokens=_NUM_PROMPT_TOKENS,
        )
        continuous, static = [], []
        for run in [items[:max_num_seqs]] + [items] * repeats:
            continuous.append(await closed_loop(continuous_client, run, len(run)))
            static.append(await closed_loop(static_client, run, len(run)))
    del continuous[0], static[0]  # the warm-up
    return {
        "seqs": max_num_seqs,
        "requests": num_requests,
        "mean_output_tokens": statistics.mean(item.max_tokens for item in items),
        "longest_output_tokens": max(item.max_tokens for item in items),
        "continuous_tokens_per_s": statistics.median(run.output_tokens_per_s for run in continuous),
        "static_tokens_per_s": statistics.median(run.output_tokens_per_s for run in static),
        "ratio": statistics.median(
            ours.output_tokens_per_s / theirs.output_tokens_per_s
            for ours, theirs in zip(continuous, static, strict=True)
        ),
        "continuous_ttft_p50_ms": _ttft_p50_ms(continuous),
        "static_ttft_p50_ms": _ttft_p50_ms(static),
        "repeats": repeats,
    }


def _ttft_p50_ms(runs: list[LoadRun]) -> float:
    return 1000 * statistics.median(trace.token_times[0] - trace.sent_time for run in runs for trace in run.traces)
