"""The core, the loop, the desk and the streams together, over a link that does to them whatever a link can do.

Only the network is simulated: an executor in memory (the seats and the mock, which check every plan and every block),
and calls whose messages move, break and repeat when a rule says so. One event loop runs everything by hand; its time is
virtual. Each client must get a prefix of an answer that is computed in one go, and all of it in the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest import mock

import grpc
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_client import Client, whole_answer
from simulated_link import BLOCK_SIZE, EOS_RATE, MANY_BLOCKS, Call, Executor, Network, rpc_error, unavailable
from virtual_time import VirtualLoop, turns

from everystop import channel
from everystop.errors import Reason, ServiceError
from everystop.executor.v1 import executor_pb2
from everystop.scheduler.v1 import inference_pb2 as pb
from everystop.settings import SchedulerConfig
from scheduler_svc.loop import Loop
from scheduler_svc.servicer import InferenceServicer

CONFIG = SchedulerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=12,
    max_prefill_chunk=5,
    max_losses=1000,
    max_unread_s=1e6,
    step_timeout_s=5.0,
)


def clear_or_add_token(result: executor_pb2.StepResult) -> None:
    if result.token_ids:
        del result.token_ids[:]
    else:
        result.token_ids.append(0)


GARBLES: list[Callable[[executor_pb2.StepResult], object]] = [
    clear_or_add_token,
    lambda result: result.token_ids.append(1),
    lambda result: result.token_ids.extend([259] * 5),
    lambda result: setattr(result, "step_id", result.step_id + 2),  # a lie about the next step can't be told from it
    lambda result: setattr(result, "step_id", 2**64 - 1),
    lambda result: result.failures.add(slot=77, reason="none of mine"),
    lambda result: result.logprobs.add(slot=0, token_ids=[1], logprobs=[float("nan")]),
]
NO_RESULTS = [b"", b"\xff", executor_pb2.ExecuteStepsResponse(executor=executor_pb2.ExecutorInfo()).SerializeToString()]


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    max_tokens = draw(st.integers(1, 24))
    return pb.GenerateRequest(
        request_id=draw(st.sampled_from("abcdefgh")),
        token_ids=pb.TokenIds(ids=draw(st.lists(st.integers(0, 258), min_size=1, max_size=20))),
        sampling=pb.SamplingParams(temperature=draw(st.sampled_from([0.0, 0.8])), seed=draw(st.integers(0, 5))),
        stop=pb.StopConditions(
            max_tokens=max_tokens,
            min_tokens=draw(st.sampled_from([0, 0, max_tokens // 2])),
            stop_strings=draw(st.sampled_from([(), (), ("e",), (" t", "n"), ("the", "as")])),
            stop_token_ids=draw(st.sampled_from([(), (), (ord("s"),)])),
            ignore_eos=draw(st.booleans()),
        ),
    )


replacements = st.sampled_from(
    [
        *(Executor(num_blocks=num_blocks) for num_blocks in (MANY_BLOCKS, MANY_BLOCKS, MANY_BLOCKS, 6, 12, 40)),
        *(Executor(eos_rate=0.1), Executor(block_size=8), Executor(is_silent=True)),
        *(Executor(max_num_seqs=2), Executor(protocol_version=99)),
    ]
)
breaks = st.sampled_from(
    [
        unavailable("connection reset"),
        rpc_error(ServiceError(grpc.StatusCode.ABORTED, Reason.SUPERSEDED, "a newer scheduler has connected")),
        rpc_error(ServiceError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, "step 7 failed")),
        None,
    ]
)


class LoopMachine(RuleBasedStateMachine):
    """Rules are what clients, executors and networks do, in any order and at any moment of the loop's turn."""

    def __init__(self) -> None:
        super().__init__()
        self.event_loop = VirtualLoop()
        self.clients: list[Client] = []
        self.jumped_s = 0.0
        self.fewest_blocks = MANY_BLOCKS
        self.network = Network()
        self.loop = Loop(CONFIG, clock=lambda: self.event_loop.time() + self.jumped_s)
        self.servicer = InferenceServicer(self.loop)
        with mock.patch.object(channel, "client_channel", return_value=self.network):
            self.task = self.event_loop.create_task(self.loop.run(lambda _is_connected: None))
            self.turn(3)

    @initialize(is_late=st.booleans())
    def begin(self, is_late: bool) -> None:
        if not is_late:
            self.listen(Executor())
            self.turn(30)

    def turn(self, num_turns: int) -> None:
        """Let everybody on the event loop have so many turns; no time passes."""
        self.event_loop.run_until_complete(turns(num_turns))

    @property
    def call(self) -> Call | None:
        """The connection in use, or what is left of it."""
        return self.network.calls[-1] if self.network.calls else None

    # -- clients

    @rule(
        request=requests(),
        num_resumed=st.sampled_from([0, 0, 0, 1, 5, 30]),
        is_slow=st.sampled_from([False] * 4 + [True]),
    )
    def submit(self, request: pb.GenerateRequest, num_resumed: int, is_slow: bool) -> None:
        wanted = whole_answer(request, EOS_RATE)
        request.resume.token_ids.extend(wanted.token_ids[:num_resumed])
        rivals = [other for other in self.clients if other.request.request_id == request.request_id]
        client = Client(request, wanted)
        if not is_slow:
            client.reads.set()
        has_rival = any(not rival.task.done() for rival in rivals)
        was_served, room_before = self.loop.model is not None, self.room()
        client.task = self.event_loop.create_task(client.call(self.servicer))
        self.clients.append(client)
        self.turn(1)
        if self.loop.model is None or self.loop.core is None:
            assert client.refusal is Reason.NO_EXECUTOR
        elif was_served and client.num_tokens > max(room_before, self.room()):
            assert client.refusal is Reason.INVALID_FIELD
        elif was_served and client.num_tokens <= min(room_before, self.room()):
            assert client.refusal is None or (client.refusal is Reason.REQUEST_ID_IN_USE and has_rival)

    @precondition(lambda self: self.living())
    @rule(choice=st.integers(0, 9))
    def cancel(self, choice: int) -> None:
        living = self.living()
        living[choice % len(living)].cancel()

    @precondition(lambda self: self.living())
    @rule(choice=st.integers(0, 9))
    def stop_or_go_on_reading(self, choice: int) -> None:
        living = self.living()
        reads = living[choice % len(living)].reads
        if reads.is_set():
            reads.clear()
        else:
            reads.set()

    # -- time

    @rule(num_turns=st.integers(1, 4))
    def go_on(self, num_turns: int) -> None:
        self.turn(num_turns)

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.event_loop.run_until_complete(asyncio.sleep(seconds))

    @rule(seconds=st.sampled_from([-1e6, -3.0, 3.0, 1e9]))
    def let_the_clock_jump(self, seconds: float) -> None:
        self.jumped_s += seconds

    # -- the executor and its messages

    @precondition(lambda self: self.call and self.call.plans)
    @rule()
    def execute(self) -> None:
        assert self.call is not None
        self.call.execute()

    @precondition(lambda self: self.call and self.call.results)
    @rule()
    def deliver(self) -> None:
        assert self.call is not None
        self.call.arrive(self.call.results.popleft())

    @rule(num_steps=st.integers(1, 12), num_turns=st.integers(2, 6))
    def run(self, num_steps: int, num_turns: int) -> None:
        """Steps without a disturbance, one after the other."""
        for _ in range(num_steps):
            call = self.call
            if call is not None and call.plans:
                call.execute()
            if call is not None and call.results:
                call.arrive(call.results.popleft())
            self.turn(num_turns)

    @precondition(lambda self: self.call and self.call.results)
    @rule()
    def deliver_twice(self) -> None:
        assert self.call is not None
        self.call.was_tampered_with = True
        self.call.arrive(self.call.results[0])

    @precondition(lambda self: self.call and self.call.results)
    @rule(garble=st.sampled_from(GARBLES))
    def deliver_garbage(self, garble: Callable[[executor_pb2.StepResult], object]) -> None:
        assert self.call is not None
        self.call.was_tampered_with = True
        message = executor_pb2.ExecuteStepsResponse.FromString(self.call.results.popleft())
        garble(message.result)
        self.call.arrive(message.SerializeToString())

    @precondition(lambda self: self.call)
    @rule(message=st.sampled_from(NO_RESULTS))
    def deliver_what_is_no_result(self, message: bytes) -> None:
        assert self.call is not None
        self.call.was_tampered_with = True
        self.call.arrive(message)

    @precondition(lambda self: self.call)
    @rule(error=breaks)
    def break_off(self, error: grpc.RpcError | None) -> None:
        """The connection ends; the executor stays and forgets."""
        assert self.call is not None
        self.call.break_off(error)

    @precondition(lambda self: self.call)
    @rule()
    def break_writes(self) -> None:
        """The scheduler hears of it when it sends; results that are on their way still arrive."""
        assert self.call is not None
        self.call.break_writes(unavailable("broken pipe"))

    @precondition(lambda self: self.network.executor)
    @rule()
    def die(self) -> None:
        self.network.executor = None
        self.network.listening.clear()
        if self.call is not None:
            self.call.break_off(unavailable("connection reset by peer"))

    @precondition(lambda self: self.network.executor is None)
    @rule(executor=replacements)
    def come_back(self, executor: Executor) -> None:
        # The first one that is taken in says what is served; answers are computed for the default.
        is_known = self.loop.model is not None
        self.listen(executor if is_known or executor.is_refused_by_all else Executor())

    def listen(self, executor: Executor) -> None:
        self.network.executor = executor
        self.network.listening.set()

    # -- what must hold

    def room(self) -> int:
        """The most tokens that a request may have."""
        return self.loop.core.config.max_num_tokens if self.loop.core is not None else 0

    def living(self) -> list[Client]:
        return [client for client in self.clients if not client.task.done()]

    @invariant()
    def nobody_gets_a_wrong_token(self) -> None:
        for client in self.clients:
            client.check_prefix()

    @invariant()
    def everything_is_in_one_place(self) -> None:
        assert not self.task.done(), "the loop died"
        core, link, call = self.loop.core, self.loop.link, self.call
        if core is None:
            return
        self.fewest_blocks = min(self.fewest_blocks, core.config.num_blocks)
        core.check_integrity()
        assert 0 <= core.num_used_blocks <= core.config.num_blocks
        assert (core.num_used_blocks == 0) == (core.num_running == 0)
        if link is not None and call is not None and not call.was_tampered_with:
            on_their_way = len(call.plans) + len(call.results) + call.num_unread + len(link.results)
            # A plan is in flight for the core a moment before it is on its way.
            assert on_their_way <= core.num_in_flight_steps <= min(on_their_way + 1, 2)

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            for task in asyncio.all_tasks(self.event_loop):
                task.cancel()
            self.turn(3)
            self.event_loop.close()

    def finish(self) -> None:
        """A good executor comes and stays: everybody gets the rest, and nothing is left."""
        for client in self.clients:
            client.reads.set()
        if self.network.executor is None or not self.network.executor.is_the_same:
            self.die()
            self.wait(1.0)
            self.listen(Executor())
        if self.call is not None and self.call.was_tampered_with:
            self.call.break_off(unavailable("connection reset"))
        for _ in range(400):
            self.wait(0.1)
            self.everything_is_in_one_place()
            self.run(num_steps=8, num_turns=5)
            core = self.loop.core
            if not self.living() and core is not None and not core.num_in_flight_steps:
                break
        assert self.living() == []
        assert core is not None
        assert (self.loop.desk.num_requests, core.num_used_blocks, core.requests) == (0, 0, {})
        for client in self.clients:
            client.check_prefix()
            if not client.is_cancelled and client.finished is None:
                self.check_refusal(client)

    def check_refusal(self, client: Client) -> None:
        if (
            client.is_accepted
        ):  # the only ones that may be given up: those that an executor with fewer blocks can't hold
            assert client.refusal is Reason.EXECUTION_FAILED
            assert client.num_tokens > self.fewest_blocks * BLOCK_SIZE + 1
            assert "KV blocks" in client.refusal_message
        else:
            assert client.refusal in (Reason.NO_EXECUTOR, Reason.INVALID_FIELD, Reason.REQUEST_ID_IN_USE)


LoopMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, derandomize=True, deadline=None)
TestLoopMachine = LoopMachine.TestCase
