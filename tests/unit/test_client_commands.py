"""What the commands put into words."""

import grpc
import pytest

from everystop.client import Finished, FinishReason, Timings, Usage
from everystop.commands.generating import summary
from everystop.commands.shared import in_one_line
from everystop.commands.watching import in_words
from everystop.errors import Reason, ServiceError, invalid
from everystop.scheduler.v1 import admin_pb2 as pb


def finished(
    reason: FinishReason = FinishReason.LENGTH,
    matched_stop: str | int | None = None,
    num_output_tokens: int = 11,
    num_preemptions: int = 0,
) -> Finished:
    return Finished(
        reason,
        matched_stop,
        Usage(num_prompt_tokens=5, num_cached_tokens=0, num_output_tokens=num_output_tokens),
        Timings(queued_ms=1, first_token_ms=100, total_ms=600, num_preemptions=num_preemptions),
    )


def test_sums_an_answer_up() -> None:
    expected = (
        "11 tokens, cut off at the largest length, prompt of 5 tokens, first token after 100 ms, then 20.0 tokens/s"
    )
    assert summary(finished()) == expected
    assert summary(finished(num_preemptions=2)) == expected + ", preempted 2 times"


def test_gives_no_rate_where_there_is_none() -> None:
    assert "tokens/s" not in summary(finished(num_output_tokens=1))


@pytest.mark.parametrize(
    ("reason", "matched_stop", "words"),
    [
        (FinishReason.STOP, "\n", r"stopped at '\n'"),
        (FinishReason.STOP, 7, "stopped at token 7"),
        (FinishReason.STOP, None, "ended"),
        (FinishReason.UNKNOWN, None, "ended"),
    ],
)
def test_says_why_an_answer_ended(reason: FinishReason, matched_stop: str | int | None, words: str) -> None:
    assert f", {words}, " in summary(finished(reason, matched_stop))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.TRANSPORT, "failed to connect to all addresses"),
            "no scheduler at host:1; start one with `everystop serve`",
        ),
        (
            ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.NO_EXECUTOR, "no executor has answered yet"),
            "no executor has answered yet (UNAVAILABLE)",
        ),
        (
            ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, Reason.TRANSPORT, "Deadline Exceeded"),
            "the time is up (--timeout)",
        ),
        (
            invalid("stop.max_tokens", "is 0, expected at least 1"),
            "stop.max_tokens: is 0, expected at least 1 (INVALID_ARGUMENT)",
        ),
    ],
)
def test_says_what_went_wrong_in_one_line(error: ServiceError, line: str) -> None:
    assert in_one_line(error, "host:1") == line


SERVING = pb.GetStatusResponse(
    version="1.2.3",
    state=pb.SCHEDULER_STATE_SERVING,
    state_reason="an executor is connected",
    num_running=3,
    num_waiting=2,
    blocks=pb.BlockUsage(num_blocks=4096, num_used_blocks=1024, block_size=16),
    knobs=pb.Knobs(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_model_len=2048,
        max_prefill_chunk=256,
        watermark=0.01,
        policy="fcfs",
        batching="continuous",
    ),
    executor=pb.ExecutorStatus(
        address="host:2", epoch=9, backend="cpu", device="cpu", dtype="float32", model="small", idle_share=0.021
    ),
    counters=pb.Counters(
        num_steps=1203,
        num_requests=40,
        num_finished=31,
        num_cancelled=3,
        num_failed=1,
        num_preemptions=2,
        num_prompt_tokens=12000,
        num_output_tokens=5000,
        num_recomputed_tokens=300,
    ),
    uptime_s=3723.9,
)


def test_tells_a_serving_scheduler() -> None:
    assert in_words(SERVING, "host:1").splitlines() == [
        "Scheduler 1.2.3 at host:1 is serving, up 1 h 2 min.",
        "Executor at host:2 runs small in float32 on cpu (cpu backend), idle 2.1% of the time although there was work.",
        "Requests: 3 running, 2 waiting.",
        "KV cache: 1,024 of 4,096 blocks in use (25.0%), 16 tokens each.",
        "Limits: 64 sequences and 512 tokens a step (256 of one prompt), 2,048 tokens a sequence;"
        " continuous batching, fcfs policy, 1.0% of the blocks kept free.",
        "Since the start: 1,203 steps; 40 requests, of these 31 finished, 3 cancelled, 1 failed;"
        " 12,000 prompt tokens, 5,000 output tokens; 2 preemptions, 300 tokens computed again.",
    ]


def test_tells_a_scheduler_without_executor() -> None:
    connecting = pb.GetStatusResponse(
        version="1.2.3", state=pb.SCHEDULER_STATE_CONNECTING, state_reason="connection refused", uptime_s=0.4
    )
    words = in_words(connecting, "host:1")
    assert words.startswith(
        "Scheduler 1.2.3 at host:1 is waiting for its executor (connection refused), up 0 s.\nRequests: "
    )
    assert "KV cache" not in words
