"""The answer of `AdminService.GetStatus`."""

from __future__ import annotations

import everystop
from everystop.scheduler.v1 import admin_pb2 as pb
from scheduler_svc.ledger import COMPLETE
from scheduler_svc.loop import Loop


def snapshot(loop: Loop, *, uptime_s: float) -> pb.GetStatusResponse:
    """Everything that the loop, the core and the connection know, at this moment."""
    status = pb.GetStatusResponse(
        version=everystop.__version__,
        state=_state(loop),
        state_reason=_state_reason(loop),
        knobs=_knobs(loop),
        counters=_counters(loop),
        uptime_s=uptime_s,
    )
    if loop.core is not None:
        status.num_running, status.num_waiting = loop.core.num_running, loop.core.num_waiting
        status.blocks.num_blocks = loop.core.config.num_blocks
        status.blocks.num_used_blocks = loop.core.num_used_blocks
        status.blocks.block_size = loop.core.config.block_size
    if loop.link is not None:
        status.executor.CopyFrom(_executor(loop))
    return status


def _state(loop: Loop) -> pb.SchedulerState.ValueType:
    if loop.desk.is_closing:
        return pb.SCHEDULER_STATE_DRAINING
    return pb.SCHEDULER_STATE_CONNECTING if loop.link is None else pb.SCHEDULER_STATE_SERVING


def _state_reason(loop: Loop) -> str:
    if loop.desk.is_closing:
        return f"asked to end, with {loop.desk.num_requests} requests still in"
    return loop.state_reason


def _knobs(loop: Loop) -> pb.Knobs:
    config = loop.config
    return pb.Knobs(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=loop.model.max_model_len if loop.model is not None else config.max_model_len or 0,
        max_prefill_chunk=config.max_prefill_chunk,
        watermark=config.watermark,
        policy=config.policy,
        batching=config.batching,
    )


def _executor(loop: Loop) -> pb.ExecutorStatus:
    assert loop.link is not None
    executor = loop.link.executor
    return pb.ExecutorStatus(
        address=loop.config.executor_address,
        epoch=executor.epoch,
        backend=executor.backend,
        device=executor.device,
        dtype=executor.dtype,
        model=executor.model.name,
        idle_share=loop.stats.executor_idle_share,
    )


def _counters(loop: Loop) -> pb.Counters:
    outcomes = loop.desk.ledger.outcomes
    counters = pb.Counters(
        num_steps=loop.stats.num_steps,
        num_requests=loop.desk.ledger.num_submitted,
        num_finished=sum(outcomes[reason] for reason in COMPLETE),
        num_cancelled=outcomes["cancelled"],
        num_failed=outcomes["execution_failed"],
        num_executor_connections=loop.stats.num_connections,
        num_plan_bytes=loop.stats.num_plan_bytes,
        plan_bytes_p50=loop.stats.plan_bytes_p50,
    )
    if loop.core is not None:
        core = loop.core.counters
        counters.num_preemptions = core.num_preemptions
        counters.num_prompt_tokens = core.num_prompt_tokens
        counters.num_output_tokens = core.num_output_tokens
        counters.num_recomputed_tokens = core.num_recomputed_tokens
    return counters
