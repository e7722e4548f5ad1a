"""What the split into processes costs: the whole service against the bare forward loop, same backend, same requests."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

import click

from everystop.client import AsyncClient
from everystop_lab import workload as workloads
from everystop_lab.bare import Order
from everystop_lab.bench.common import report, shared_options, workload_option
from everystop_lab.load import closed_loop
from everystop_lab.service import bare_loop, serving


@click.command
@click.option("--streams", "num_streams", type=click.IntRange(1, 4096), default=16, show_default=True)
@click.option(
    "--requests", "num_requests", type=click.IntRange(1), help="Requests in a run.  [default: 1.5 times the streams]"
)
@workload_option
@shared_options
def split(
    num_streams: int,
    num_requests: int | None,
    workload: Path | None,
    backend: str,
    model: str,
    dtype: str,
    repeats: int,
    *,
    as_json: bool,
) -> None:
    """Client, scheduler and executor over gRPC, against the bare forward loop in one process."""
    flags = [f"--model={model}", f"--dtype={dtype}"]
    num_requests = num_requests or (3 * num_streams + 1) // 2
    figures = asyncio.run(_measure(flags, backend, num_streams, num_requests, workload, repeats))
    report(figures, as_json=as_json)


async def _measure(
    flags: list[str], backend: str, num_streams: int, num_requests: int, workload: Path | None, repeats: int
) -> dict[str, float | int]:
    async with (
        serving([f"--executor={backend}", f"--max-num-seqs={num_streams}", *flags]) as address,
        bare_loop([f"--backend={backend}", *flags]) as bare,
        AsyncClient(address) as client,
    ):
        vocab_size = (await client.get_model()).vocab_size
        items = workloads.read(workload) if workload else workloads.mixed(num_requests, vocab_size)
        knobs = (await client.get_status()).knobs
        warm_up = workloads.mixed(num_streams, vocab_size, seed=1)
        split_rates, bare_rates = [], []
        for run in [warm_up] + [items] * repeats:
            order = Order(run, num_streams, knobs.max_num_batched_tokens, knobs.max_prefill_chunk)
            split_rates.append((await closed_loop(client, run, num_streams)).output_tokens_per_s)
            bare_rates.append(await bare.tokens_per_s(order))
        status = await client.get_status()
    del split_rates[0], bare_rates[0]  # the warm-up
    return {
        "streams": num_streams,
        "split_tokens_per_s": statistics.median(split_rates),
        "bare_tokens_per_s": statistics.median(bare_rates),
        "ratio": statistics.median([ours / theirs for ours, theirs in zip(split_rates, bare_rates, strict=True)]),
        "executor_idle_share": status.executor.idle_share,
        "plan_bytes_per_step_p50": status.counters.plan_bytes_p50,
        "requests": len(items),
        "repeats": repeats,
    }
