"""What goes wrong with one stream or one connection ends that one alone; the loop goes on."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

import grpc
import pytest
from simulated_client import Client, whole_answer
from simulated_link import EOS_RATE, Executor, Network
from virtual_time import VirtualLoop, turns

from everystop import channel, plan_codec
from everystop.errors import Reason
from everystop.executor.v1 import executor_pb2
from everystop.scheduler.v1 import inference_pb2 as pb
from everystop.settings import SchedulerConfig
from scheduler_svc.loop import Loop
from scheduler_svc.servicer import InferenceServicer
from scheduler_svc.stream import RequestStream


class Scene:
    """The loop, a simulated executor and its clients, run by hand."""

    def __init__(self) -> None:
        self.event_loop = VirtualLoop()
        self.network = Network()
        self.loop = Loop(SchedulerConfig(max_unread_s=1e6), clock=self.event_loop.time)
        self.servicer = InferenceServicer(self.loop)
        with mock.patch.object(channel, "client_channel", return_value=self.network):
            self.task = self.event_loop.create_task(self.loop.run(lambda _is_connected: None))
            self.turn(3)
        self.network.executor = Executor()
        self.network.listening.set()
        self.turn(30)

    def turn(self, num_turns: int) -> None:
        self.event_loop.run_until_complete(turns(num_turns))

    def pass_time(self, seconds: float) -> None:
        self.event_loop.run_until_complete(asyncio.sleep(seconds))
        self.turn(30)

    def submit(self, request_id: str, *, stop_strings: tuple[str, ...] = (), max_tokens: int = 8) -> Client:
        request = pb.GenerateRequest(
            request_id=request_id,
            token_ids=pb.TokenIds(ids=[1, 2, 3]),
            sampling=pb.SamplingParams(temperature=0.8, seed=3),
            stop=pb.StopConditions(max_tokens=max_tokens, ignore_eos=True, stop_strings=stop_strings),
        )
        client = Client(request, whole_answer(request, EOS_RATE))
        client.reads.set()
        client.task = self.event_loop.create_task(client.call(self.servicer))
        self.turn(3)
        return client

    def run(self) -> None:
        """Steps until nobody waits for anything more."""
        for _ in range(100):
            call = self.network.calls[-1]
            if call.plans:
                call.execute()
            if call.results:
                call.arrive(call.results.popleft())
            self.turn(5)

    def close(self) -> None:
        for task in asyncio.all_tasks(self.event_loop):
            task.cancel()
        self.turn(3)
        self.event_loop.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_two_results_that_arrive_at_once_end_a_stop_string_at_the_last_but_one_token(scene: Scene) -> None:
    """The core has ended the request by its length when the stop string before that is found."""
    client = scene.submit("a", max_tokens=2)
    (first, _) = client.wanted.text
    client.cancel()
    scene.run()
    client = scene.submit("b", max_tokens=2, stop_strings=(first,))
    call = scene.network.calls[-1]
    for _ in range(2):
        call.execute()
    for _ in range(2):  # without a turn in between
        call.arrive(call.results.popleft())
    scene.run()
    assert not scene.task.done()
    client.check_prefix()
    assert client.finished is not None
    assert client.finished.stop_string == first


def test_a_bug_in_the_delivery_of_one_answer_ends_that_one_with_an_error(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = RequestStream.digest

    def broken_digest(stream, finish_in_core):  # type: ignore[no-untyped-def]
        if stream.request.request_id == "unlucky":
            raise ZeroDivisionError
        digest(stream, finish_in_core)

    monkeypatch.setattr(RequestStream, "digest", broken_digest)
    unlucky, lucky = scene.submit("unlucky"), scene.submit("lucky")
    scene.run()
    assert not scene.task.done()
    assert unlucky.refusal is Reason.INTERNAL
    lucky.check_prefix()
    assert lucky.finished is not None
    assert scene.loop.core is not None
    assert (scene.loop.desk.num_requests, scene.loop.core.requests) == (0, {})


GARBAGE = b"\xff\xff\xff"


def garbled_status() -> grpc.aio.AioRpcError:
    trailers = grpc.aio.Metadata(("grpc-status-details-bin", GARBAGE))
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, details="gone")


def test_an_end_whose_details_are_garbage_is_a_loss_as_any(scene: Scene) -> None:
    client = scene.submit("a")
    scene.network.calls[-1].break_off(garbled_status())
    scene.pass_time(5.0)
    scene.run()
    assert not scene.task.done()
    client.check_prefix()
    assert client.finished is not None


def test_a_result_that_cannot_be_read_is_a_loss(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    client = scene.submit("a")
    with monkeypatch.context() as patch:
        patch.setattr(plan_codec, "decode_result", mock.Mock(side_effect=OverflowError))
        call = scene.network.calls[-1]
        call.execute()
        call.arrive(call.results.popleft())
        scene.turn(10)
    assert "OverflowError" in scene.loop.state_reason
    scene.pass_time(5.0)
    scene.run()
    client.check_prefix()
    assert client.finished is not None


def test_pieces_of_a_tokenizer_that_are_none_are_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pieces(_request: Any, timeout: float) -> AsyncIterator[None]:
        yield None  # as gRPC does with bytes that are no message

    with monkeypatch.context() as patch:
        patch.setattr(Network, "unary_stream", lambda *_, **__: pieces)
        scene = Scene()
    assert not scene.task.done()
    assert "garbage" in scene.loop.state_reason
    scene.close()


@pytest.mark.parametrize("num_turns", range(8))
def test_a_loop_that_is_cancelled_while_it_leaves_a_connection_ends(scene: Scene, num_turns: int) -> None:
    nonsense = executor_pb2.ExecuteStepsResponse(result=executor_pb2.StepResult(step_id=77))
    scene.network.calls[-1].arrive(nonsense.SerializeToString())
    scene.turn(num_turns)
    scene.task.cancel()
    scene.turn(10)
    assert scene.task.cancelled()
