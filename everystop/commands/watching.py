"""`everystop status`: what the scheduler is doing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
from collections.abc import Callable

import click
from google.protobuf import json_format

from everystop.client import AsyncClient
from everystop.commands.shared import address_option, errors_in_one_line
from everystop.scheduler.v1 import admin_pb2 as pb

_ANSWER_WITHIN_S = 10.0


@click.command()
@address_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line, with the field names of the API.")
@click.option("--watch", is_flag=True, help="Print again and again, until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How long --watch waits in between.",
)
@click.option("--check", is_flag=True, help="Fail also while it isn't serving.")
def status(address: str, as_json: bool, watch: bool, interval: float, check: bool) -> None:
    """Say what the scheduler is doing, and why it isn't ready when it isn't. Fails when none answers."""
    if check and watch:
        raise click.UsageError("--check looks once, --watch again and again")
    show = _as_json if as_json else functools.partial(in_words, address=address)
    with errors_in_one_line(address), contextlib.suppress(KeyboardInterrupt):
        state = asyncio.run(_watch(address, show, interval if watch else None))
        if check and state != pb.SCHEDULER_STATE_SERVING:
            sys.exit(1)


async def _watch(
    address: str, show: Callable[[pb.GetStatusResponse], str], interval_s: float | None
) -> pb.SchedulerState.ValueType:
    """Print a snapshot and return its state, or go on every `interval_s` seconds if that is given."""
    async with AsyncClient(address) as client:
        while True:
            snapshot = await client.get_status(timeout=_ANSWER_WITHIN_S)
            if interval_s is None:
                click.echo(show(snapshot))
                return snapshot.state
            click.clear()  # does nothing when the output is no terminal
            click.echo(show(snapshot))
            await asyncio.sleep(interval_s)


def _as_json(snapshot: pb.GetStatusResponse) -> str:
    fields = json_format.MessageToDict(
        snapshot, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(fields)


_STATES = {
    pb.SCHEDULER_STATE_CONNECTING: "is waiting for its executor",
    pb.SCHEDULER_STATE_SERVING: "is serving",
    pb.SCHEDULER_STATE_DRAINING: "is draining",
}


def in_words(snapshot: pb.GetStatusResponse, address: str) -> str:
    """The snapshot as a few sentences, one a line."""
    state = _STATES.get(snapshot.state, "is in a state that this client does not know")
    is_plain = snapshot.state == pb.SCHEDULER_STATE_SERVING
    reason = "" if is_plain or not snapshot.state_reason else f" ({snapshot.state_reason})"
    lines = [
        f"Scheduler {snapshot.version} at {address} {state}{reason}, up {_duration(snapshot.uptime_s)}.",
        f"Requests: {snapshot.num_running} running, {snapshot.num_waiting} waiting.",
    ]
    if snapshot.HasField("executor"):
        lines[1:1] = [_executor_in_words(snapshot.executor)]
        lines.append(_blocks_in_words(snapshot.blocks))
    lines += [_knobs_in_words(snapshot.knobs), _counters_in_words(snapshot.counters)]
    return "\n".join(lines)


def _executor_in_words(executor: pb.ExecutorStatus) -> str:
    return (
        f"Executor at {executor.address} runs {executor.model} in {executor.dtype} on {executor.device}"
        f" ({executor.backend} backend), idle {executor.idle_share:.1%} of the time although there was work."
    )


def _blocks_in_words(blocks: pb.BlockUsage) -> str:
    used_share = blocks.num_used_blocks / max(blocks.num_blocks, 1)
    return (
        f"KV cache: {blocks.num_used_blocks:,} of {blocks.num_blocks:,} blocks in use ({used_share:.1%}),"
        f" {blocks.block_size} tokens each."
    )


def _knobs_in_words(knobs: pb.Knobs) -> str:
    return (
        f"Limits: {knobs.max_num_seqs:,} sequences and {knobs.max_num_batched_tokens:,} tokens a step"
        f" ({knobs.max_prefill_chunk:,} of one prompt), {knobs.max_model_len:,} tokens a sequence;"
        f" {knobs.batching} batching, {knobs.policy} policy, {knobs.watermark:.1%} of the blocks kept free."
    )


def _counters_in_words(counters: pb.Counters) -> str:
    return (
        f"Since the start: {counters.num_steps:,} steps; {counters.num_requests:,} requests, of these"
        f" {counters.num_finished:,} finished, {counters.num_cancelled:,} cancelled, {counters.num_failed:,} failed;"
        f" {counters.num_prompt_tokens:,} prompt tokens, {counters.num_output_tokens:,} output tokens;"
        f" {counters.num_preemptions:,} preemptions, {counters.num_recomputed_tokens:,} tokens computed again."
    )


def _duration(seconds: float) -> str:
    """Two units at most: "3 min 20 s"."""
    minutes, whole_seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (whole_seconds, "s")]
    first = next((index for index, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count} {unit}" for count, unit in units[first : first + 2])
