"""Bad answers of an executor: whatever it says at a handshake or as a result, the loop lives and serves the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from fuzzing import Fuzzer, num_inputs
from simulated_client import Client, whole_answer
from simulated_link import EOS_RATE, Executor, Network, rpc_error, unavailable
from virtual_time import VirtualLoop, turns

from everystop import channel
from everystop.errors import ServiceError
from everystop.executor.v1 import executor_pb2 as pb
from everystop.scheduler.v1 import inference_pb2
from everystop.settings import SchedulerConfig
from scheduler_svc.loop import Loop
from scheduler_svc.servicer import InferenceServicer

NUM_INPUTS = num_inputs(400)
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12, max_prefill_chunk=5, max_losses=1000)
GOOD = pb.ExecuteStepsResponse.SerializeToString


def bad_bytes(fuzzer: Fuzzer, message: pb.ExecuteStepsResponse) -> bytes:
    match fuzzer.random.randint(0, 3):
        case 0:
            return fuzzer.noise()
        case 1:
            return fuzzer.garble(message.SerializeToString())
        case _:
            for _ in range(fuzzer.random.randint(1, 3)):
                fuzzer.spoil(getattr(message, message.WhichOneof("message") or "result"))
            return message.SerializeToString()


class Service:
    """The loop over a network that is none, and one client after another."""

    def __init__(self, event_loop: VirtualLoop) -> None:
        self.event_loop = event_loop
        self.network = Network()
        self.loop = Loop(CONFIG, clock=event_loop.time)
        self.servicer = InferenceServicer(self.loop)
        with mock.patch.object(channel, "client_channel", return_value=self.network):
            self.task = event_loop.create_task(self.loop.run(lambda _is_connected: None))
            self.turn(3)

    def turn(self, num_turns: int) -> None:
        self.event_loop.run_until_complete(turns(num_turns))
        assert not self.task.done(), "the loop died"

    def connect(self, tell: Callable[[pb.ExecuteStepsResponse], bytes]) -> None:
        """Break the connection, if there is one; the next one's handshake is what `tell` makes of it."""
        self.network.tell = tell
        self.network.executor = Executor()
        self.network.listening.set()
        if self.network.calls:
            self.network.calls[-1].break_off(unavailable("connection reset"))
        self.event_loop.run_until_complete(asyncio.sleep(4.0))
        self.turn(20)

    def ask(self) -> Client:
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=b"hello, hello"),
            stop=inference_pb2.StopConditions(max_tokens=12, ignore_eos=True),
            output=inference_pb2.OutputOptions(logprobs=2, prompt_logprobs=1),
        )
        request.sampling.temperature = 0.0
        client = Client(request, whole_answer(request, EOS_RATE))
        client.reads.set()
        client.task = self.event_loop.create_task(client.call(self.servicer))
        self.turn(3)
        return client

    def step(self, change: Callable[[bytes], bytes] = bytes) -> None:
        """Run the oldest plan, if there is one, and deliver what `change` makes of its result."""
        call = self.network.calls[-1]
        if call.plans:
            try:
                call.execute()
            except ServiceError as error:  # the handshake lied about an epoch or a number of blocks
                call.break_off(rpc_error(error))
        if call.results:
            call.arrive(change(call.results.popleft()))
        self.turn(6)

    def check_serves(self) -> None:
        """A client gets its whole answer, and nothing is left of those before."""
        client = self.ask()
        for _ in range(60):
            self.step()
        client.check_prefix()
        assert client.finished is not None
        core = self.loop.core
        assert core is not None
        core.check_integrity()
        assert (core.requests, core.num_used_blocks) == ({}, 0)


@pytest.fixture
def new_service() -> Iterator[Callable[[], Service]]:
    event_loop = VirtualLoop()
    yield lambda: Service(event_loop)
    for task in asyncio.all_tasks(event_loop):
        task.cancel()
    event_loop.run_until_complete(turns(3))
    event_loop.close()


@contextmanager
def telling(seed: int) -> Iterator[None]:
    """Name the seed of a failure."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


@pytest.mark.timeout(max(120, NUM_INPUTS // 20))
def test_no_first_handshake_stops_the_loop(new_service: Callable[[], Service]) -> None:
    num_taken_in = 0
    for seed in range(NUM_INPUTS // 4):
        with telling(seed):
            service = new_service()
            service.connect(lambda message, seed=seed: bad_bytes(Fuzzer(seed), message))
            num_taken_in += service.loop.core is not None
            service.task.cancel()
    # Some are plausible: another name, another length.
    assert 0 < num_taken_in < NUM_INPUTS // 8


@pytest.mark.timeout(max(120, NUM_INPUTS // 20))
def test_no_later_handshake_stops_the_loop(new_service: Callable[[], Service]) -> None:
    service = new_service()
    service.connect(GOOD)
    for seed in range(NUM_INPUTS):
        with telling(seed):
            client = service.ask()
            service.step()
            service.connect(lambda message, seed=seed: bad_bytes(Fuzzer(seed), message))
            client.cancel()
            if seed % 20 == 0:
                service.connect(GOOD)
                service.check_serves()


@pytest.mark.timeout(max(120, NUM_INPUTS // 20))
def test_no_result_stops_the_loop(new_service: Callable[[], Service]) -> None:
    service = new_service()
    service.connect(GOOD)
    for seed in range(NUM_INPUTS):
        with telling(seed):
            fuzzer = Fuzzer(seed)
            clients = [service.ask() for _ in range(fuzzer.random.randint(1, 3))]
            for _ in range(fuzzer.random.randint(0, 8)):
                service.step()
            service.step(lambda content, fuzzer=fuzzer: bad_bytes(fuzzer, pb.ExecuteStepsResponse.FromString(content)))
            assert service.loop.core is not None
            service.loop.core.check_integrity()
            for client in clients:
                client.cancel()
            service.connect(GOOD)
            if seed % 20 == 0:
                service.check_serves()


def test_the_good_ones_are_taken_in(new_service: Callable[[], Service]) -> None:
    """Else the tests above would test nothing."""
    service = new_service()
    service.connect(GOOD)
    service.check_serves()
    assert service.loop.core is not None
    assert service.loop.core.config.num_blocks == Executor().num_blocks
