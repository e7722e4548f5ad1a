"""What both clients do when a stream breaks or a queue is full, against a scheduler that follows a script."""
# ruff: noqa: N802  # methods of a servicer are named as in the protocol

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from everystop.client import (
    Accepted,
    AsyncClient,
    Client,
    Delta,
    Event,
    Finished,
    FinishReason,
    Retry,
    Timings,
    TokenLogprobs,
    Usage,
)
from everystop.client.retry import Patience
from everystop.errors import Reason, ServiceError, invalid
from everystop.scheduler.v1 import inference_pb2 as pb
from everystop.scheduler.v1 import inference_pb2_grpc

QUICK = Retry(max_backoff_s=0.01)
BROKEN = ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.TRANSPORT, "Socket closed")
IN_USE = ServiceError(grpc.StatusCode.ALREADY_EXISTS, Reason.REQUEST_ID_IN_USE, "in use")
SECONDS = 10.0
"""Longer than anything here takes; a test that reaches it has failed."""

Script = list[pb.GenerateResponse | ServiceError | grpc.StatusCode]


def accepted(num_prompt_tokens: int = 3) -> pb.GenerateResponse:
    return pb.GenerateResponse(accepted=pb.Accepted(request_id="r1", num_prompt_tokens=num_prompt_tokens, seed=2**60))


def delta(token_ids: list[int], text: str = "", prompt_rows: tuple[int, ...] = ()) -> pb.GenerateResponse:
    rows = [pb.TokenLogprobs(token_id=token_id) for token_id in prompt_rows]
    return pb.GenerateResponse(delta=pb.Delta(token_ids=token_ids, text=text, prompt_logprobs=rows))


FINISHED = pb.GenerateResponse(
    finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(num_output_tokens=3))
)


class ScriptedScheduler(inference_pb2_grpc.InferenceServiceServicer):
    """Plays one script after another, the last one again and again; remembers what it was asked, when."""

    def __init__(self) -> None:
        self.scripts: list[Script] = []
        self.requests: list[pb.GenerateRequest] = []
        self.times: list[float] = []
        self.remaining_s: list[float] = []
        self.was_called = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        self.times.append(time.monotonic())
        self.remaining_s.append(context.time_remaining())
        self.was_called.set()
        for response in script:
            if isinstance(response, ServiceError):
                context.abort_with_status(rpc_status.to_status(response.to_status()))
            if isinstance(response, grpc.StatusCode):
                context.abort(response, "")
            yield response


@pytest.fixture
def scheduler() -> ScriptedScheduler:
    return ScriptedScheduler()


@pytest.fixture
def address(scheduler: ScriptedScheduler) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(grace=None).wait()


def with_sync(address: str, retry: Retry | None, timeout: float | None) -> list[Event]:
    with Client(address, retry=retry) as client:
        return list(client.generate("go", timeout=timeout, temperature=0.5))


def with_async(address: str, retry: Retry | None, timeout: float | None) -> list[Event]:
    async def read() -> list[Event]:
        async with AsyncClient(address, retry=retry) as client:
            return [event async for event in client.generate("go", timeout=timeout, temperature=0.5)]

    return asyncio.run(read())


Play = Callable[..., list[Event]]


@pytest.fixture(params=[with_sync, with_async])
def play(request: pytest.FixtureRequest, address: str, scheduler: ScriptedScheduler) -> Play:
    """Lets either client read one answer from a scheduler that follows these scripts."""

    def play(*scripts: Script, retry: Retry | None = QUICK, timeout: float | None = None) -> list[Event]:
        scheduler.scripts = list(scripts)
        events: list[Event] = request.param(address, retry, timeout)
        return events

    return play


ACCEPTED = Accepted("r1", num_prompt_tokens=3, num_cached_tokens=0, seed=2**60)
LAST = Finished(FinishReason.LENGTH, None, Usage(0, 0, 3), Timings(0, 0, 0, 0))


def test_a_broken_stream_goes_on_behind_what_the_client_has(play: Play, scheduler: ScriptedScheduler) -> None:
    events = play(
        [accepted(), delta([1], "a"), BROKEN],
        [accepted(), BROKEN],
        [accepted(), delta([2, 3], "bc"), BROKEN],
        [accepted(), FINISHED],
    )
    assert events == [ACCEPTED, Delta((1,), "a"), Delta((2, 3), "bc"), LAST]
    first, *resumed = scheduler.requests
    assert first == pb.GenerateRequest(text="go", sampling=pb.SamplingParams(temperature=0.5))
    for request, token_ids in zip(resumed, [[1], [1], [1, 2, 3]], strict=True):
        want = pb.GenerateRequest(text="go", request_id="r1", resume=pb.Resume(token_ids=token_ids))
        want.sampling.MergeFrom(pb.SamplingParams(temperature=0.5, seed=2**60))
        assert request == want


def test_a_request_that_nobody_accepted_is_sent_again_as_it_was(play: Play, scheduler: ScriptedScheduler) -> None:
    assert play([BROKEN], [BROKEN], [accepted(), FINISHED]) == [ACCEPTED, LAST]
    assert scheduler.requests == [pb.GenerateRequest(text="go", sampling=pb.SamplingParams(temperature=0.5))] * 3


def test_a_call_that_a_dying_server_cancels_is_a_broken_one(play: Play, scheduler: ScriptedScheduler) -> None:
    cancelled = [accepted(), delta([1], "a"), grpc.StatusCode.CANCELLED]
    assert play(cancelled, [accepted(), delta([2]), FINISHED]) == [ACCEPTED, Delta((1,), "a"), Delta((2,), ""), LAST]
    assert list(scheduler.requests[1].resume.token_ids) == [1]


def test_logprobs_of_the_prompt_come_once(play: Play) -> None:
    events = play(
        [accepted(), delta([], prompt_rows=(7, 8)), BROKEN],
        [accepted(), delta([], prompt_rows=(7,)), delta([], prompt_rows=(8, 9)), BROKEN],
        [accepted(), delta([], prompt_rows=(7, 8, 9)), delta([5], prompt_rows=(10,)), BROKEN],
        [accepted(), delta([6]), FINISHED],
    )
    rows = [TokenLogprobs(token_id, 0.0, b"") for token_id in (7, 8, 9, 10)]
    assert events == [
        ACCEPTED,
        Delta((), "", prompt_logprobs=tuple(rows[:2])),
        Delta((), "", prompt_logprobs=(rows[2],)),
        Delta((5,), "", prompt_logprobs=(rows[3],)),
        Delta((6,), ""),
        LAST,
    ]


def test_a_full_queue_is_given_the_time_that_it_asks_for(play: Play, scheduler: ScriptedScheduler) -> None:
    full = ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL, "full", retry_after_s=0.3)
    assert play([full], [full], [accepted(), FINISHED]) == [ACCEPTED, LAST]
    first, second, third = scheduler.times
    assert second - first >= 0.3
    assert third - second >= 0.3


def test_an_id_that_the_broken_call_still_holds_is_waited_for(play: Play, scheduler: ScriptedScheduler) -> None:
    events = play([accepted(), delta([1], "a"), BROKEN], [IN_USE], [IN_USE], [accepted(), delta([2]), FINISHED])
    assert events == [ACCEPTED, Delta((1,), "a"), Delta((2,), ""), LAST]
    assert len(scheduler.requests) == 4


@pytest.mark.parametrize(
    "error",
    [
        IN_USE,
        invalid("text", "is bad"),
        ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.TRANSPORT, "the message is too large"),
        ServiceError(grpc.StatusCode.INTERNAL, Reason.EXECUTION_FAILED, "logits are not finite"),
        ServiceError(grpc.StatusCode.ABORTED, Reason.SLOW_READER, "nothing was read"),
        ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, Reason.TIME_LIMIT, "too long"),
    ],
    ids=lambda error: error.code.name,
)
def test_what_would_fail_again_is_not_tried_again(
    play: Play, scheduler: ScriptedScheduler, error: ServiceError
) -> None:
    with pytest.raises(ServiceError) as caught:
        play([error], [accepted(), FINISHED])
    assert (caught.value.code, caught.value.reason) == (error.code, error.reason)
    assert len(scheduler.requests) == 1


@pytest.mark.parametrize("script", [[BROKEN], [accepted(), delta([1], "a"), BROKEN]], ids=["before", "amidst"])
def test_without_retry_a_broken_stream_is_an_error(play: Play, scheduler: ScriptedScheduler, script: Script) -> None:
    with pytest.raises(ServiceError) as caught:
        play(script, retry=None)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert len(scheduler.requests) == 1


def test_an_outage_without_end_is_an_error(play: Play, scheduler: ScriptedScheduler) -> None:
    start = time.monotonic()
    with pytest.raises(ServiceError) as caught:  # accepting alone is nothing new to a client that resumes
        play([accepted(), delta([1]), BROKEN], [accepted(), BROKEN], retry=Retry(max_elapsed_s=0.4, max_backoff_s=0.05))
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert len(scheduler.requests) > 3
    assert 0.4 <= time.monotonic() - start < SECONDS


def test_the_timeout_bounds_the_whole(play: Play, scheduler: ScriptedScheduler) -> None:
    draining = ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, "draining", retry_after_s=0.3)
    play([accepted(), delta([1]), draining], [accepted(), FINISHED], timeout=SECONDS)
    first, second = scheduler.remaining_s
    assert second < first - 0.25
    with pytest.raises(ServiceError) as caught:
        play([draining], timeout=0.2)
    assert caught.value.reason in (Reason.DRAINING, Reason.TRANSPORT)  # gRPC's own, should the first try take as long


def test_an_error_behind_the_last_event_changes_nothing(play: Play, scheduler: ScriptedScheduler) -> None:
    assert play([accepted(), delta([1], "a"), FINISHED, BROKEN]) == [ACCEPTED, Delta((1,), "a"), LAST]
    assert len(scheduler.requests) == 1


def test_an_answer_is_not_continued_by_another_model(play: Play) -> None:
    with pytest.raises(ServiceError) as caught:
        play([accepted(), delta([1], "a"), BROKEN], [accepted(num_prompt_tokens=4), delta([2]), FINISHED])
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, Reason.MODEL_CHANGED)


def test_closing_the_client_ends_a_pause_of_the_synchronous_one(address: str, scheduler: ScriptedScheduler) -> None:
    scheduler.scripts = [[ServiceError(BROKEN.code, Reason.NO_EXECUTOR, "none", retry_after_s=SECONDS)]]
    client = Client(address)
    with futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(client.complete, "go")
        assert scheduler.was_called.wait(SECONDS)
        client.close()
        start = time.monotonic()
        with pytest.raises(ServiceError) as caught:
            answer.result()
    assert caught.value.code is grpc.StatusCode.CANCELLED
    assert time.monotonic() - start < SECONDS


async def test_closing_the_client_ends_a_pause_of_the_asynchronous_one(
    address: str, scheduler: ScriptedScheduler
) -> None:
    scheduler.scripts = [[ServiceError(BROKEN.code, Reason.NO_EXECUTOR, "none", retry_after_s=SECONDS)]]
    async with AsyncClient(address) as client:
        answer = asyncio.create_task(client.complete("go"))
        await asyncio.to_thread(scheduler.was_called.wait, SECONDS)
        start = time.monotonic()
    with pytest.raises((ServiceError, asyncio.CancelledError)):
        await answer
    assert time.monotonic() - start < SECONDS


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pauses_grow_at_random_to_their_bound_and_begin_anew_after_progress() -> None:
    def longest_pauses_s() -> list[float]:
        drawn = []
        for _ in range(200):
            patience = Patience(Retry(max_backoff_s=0.5), None)
            drawn.append([patience.pause_s(BROKEN) for _ in range(5)])
        return [max(pauses) for pauses in zip(*drawn, strict=True)]

    for longest, bound in zip(longest_pauses_s(), (0.1, 0.2, 0.4, 0.5, 0.5), strict=True):
        assert 0.8 * bound < longest <= bound
    patience = Patience(Retry(), None)
    for _ in range(10):
        patience.pause_s(BROKEN)
    patience.renew()
    assert patience.pause_s(BROKEN) <= 0.1


def test_patience_is_measured_from_the_last_progress() -> None:
    clock = Clock()
    patience = Patience(Retry(max_elapsed_s=10.0), None, clock=clock)
    for _ in range(3):
        patience.pause_s(BROKEN)
        clock.now += 9.0
        patience.renew()
    patience.pause_s(BROKEN)
    clock.now += 10.0
    with pytest.raises(ServiceError) as caught:
        patience.pause_s(BROKEN)
    assert caught.value is BROKEN


def test_a_pause_that_ends_behind_the_deadline_is_not_begun() -> None:
    clock = Clock()
    patience = Patience(Retry(), 5.0, clock=clock)
    slow = ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL, "full", retry_after_s=4.0)
    assert 4.0 <= patience.pause_s(slow) <= 4.1
    clock.now += 1.5
    with pytest.raises(ServiceError) as caught:
        patience.pause_s(slow)
    assert caught.value is slow
    assert patience.remaining_s() == 3.5


@pytest.mark.parametrize("name", ["max_elapsed_s", "max_backoff_s"])
@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_refuses_limits_that_make_no_sense(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Retry(**{name: value})
