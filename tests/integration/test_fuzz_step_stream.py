"""Bad input to the executor's port: it lives, each refusal is typed, and the next scheduler gets the right tokens.

`EVERYSTOP_FUZZ_INPUTS=100000` sends so many.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from fuzzing import Fuzzer, Tally, num_inputs, talk_to
from services import check_exact, process, scheduling

from everystop import plan_codec
from everystop.executor.v1 import executor_pb2 as pb
from everystop.plan import Hello, NewSequence, SamplingParams, StepPlan

NUM_INPUTS = num_inputs(2000)
METHOD = "/everystop.executor.v1.ExecutorService/ExecuteSteps"
REASONS = {
    *("INVALID_ARGUMENT UNDECODABLE", "INVALID_ARGUMENT INVALID_PLAN", "INVALID_ARGUMENT INVALID_FIELD"),
    *("FAILED_PRECONDITION STALE_EPOCH", "FAILED_PRECONDITION STEP_GAP", "FAILED_PRECONDITION INVALID_PLAN"),
    *("FAILED_PRECONDITION EXECUTOR_LIMIT", "FAILED_PRECONDITION PROTOCOL_VERSION"),
}
CLAIM = "INTERNAL INTERNAL"
"""Of a plan that claims computed tokens which nobody has computed: only the mock, which checks its blocks, can tell."""

Service = tuple[subprocess.Popen[str], str, Path]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """The executor's process, its address and its log."""
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        process("executor_svc", tmp_path, "--backend=mock", "--mock-step-ms=0", stderr=stderr) as (started, address),
    ):
        yield started, address, log


def good_messages(epoch: int) -> list[pb.ExecuteStepsRequest]:
    """Two sequences: one decodes, one has a part of its prompt to compute; then a decode and a chunk; then an exit."""
    sampling = SamplingParams(num_logprobs=2, end_token_ids=(256, 258), min_tokens=1)
    sequences = [
        NewSequence(0, "one", 1, list(b"hello"), 5, 0, [3], sampling),
        NewSequence(1, "two", 1, list(b"hello, hello, hello!"), 20, 0, [4, 5], sampling),
    ]
    plans = [
        StepPlan(
            1, epoch, admissions=sequences, chunk_slots=[0, 1], chunk_num_tokens=[5, 12], num_seqs=2, num_tokens=17
        ),
        StepPlan(2, epoch, chunk_slots=[1], chunk_num_tokens=[8], num_seqs=2, num_tokens=9),
        StepPlan(3, epoch, exit_slots=[0], num_seqs=1, num_tokens=1),
    ]
    return [pb.ExecuteStepsRequest(plan=plan_codec.encode_plan(plan)) for plan in plans]


class Stream:
    """One step stream, in bytes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = channel.stream_stream(METHOD)(timeout=10)

    async def write(self, content: bytes) -> None:
        await self._call.write(content)

    async def read(self) -> pb.ExecuteStepsResponse | None:
        """None at the end."""
        response: Any = await self._call.read()
        return None if response is grpc.aio.EOF else pb.ExecuteStepsResponse.FromString(response)

    async def shake_hands(self) -> int:
        hello = pb.ExecuteStepsRequest(hello=plan_codec.encode_hello(Hello(4, 64)))
        await self.write(hello.SerializeToString())
        response = await self.read()
        assert response is not None
        return response.executor.epoch

    async def finish(self) -> None:
        await self._call.done_writing()
        while await self.read() is not None:
            pass


async def send_bad(channel: grpc.aio.Channel, fuzzer: Fuzzer) -> None:
    """A good beginning of any length, then a bad message."""
    stream = Stream(channel)
    num_good = fuzzer.random.randint(0, 3)
    if num_good == 0:
        good = pb.ExecuteStepsRequest(hello=plan_codec.encode_hello(Hello(4, 64)))
    else:
        messages = good_messages(await stream.shake_hands())
        for message in messages[: num_good - 1]:
            await stream.write(message.SerializeToString())
        good = messages[num_good - 1]
    content = bad_input(fuzzer, good)
    try:
        await stream.write(content)
        await stream.finish()
    except asyncio.InvalidStateError:  # it has ended already
        await stream.read()


def bad_input(fuzzer: Fuzzer, good: pb.ExecuteStepsRequest) -> bytes:
    match fuzzer.random.randint(0, 5):
        case 0:
            fuzzer.fill(good, fuzzer.random.choice((0.3, 0.8)))
        case 1 | 2 | 3:
            for _ in range(fuzzer.random.randint(1, 3)):
                fuzzer.spoil(getattr(good, good.WhichOneof("message") or "plan"))
        case 4:
            return fuzzer.garble(good.SerializeToString())
        case _:
            return fuzzer.noise()
    return good.SerializeToString()


async def good_tokens(channel: grpc.aio.Channel) -> list[list[int]]:
    """What a good session gets."""
    stream = Stream(channel)
    token_ids = []
    for message in good_messages(await stream.shake_hands()):
        await stream.write(message.SerializeToString())
        response = await stream.read()
        assert response is not None
        token_ids.append(list(response.result.token_ids))
    await stream.finish()
    return token_ids


@pytest.mark.timeout(max(120, NUM_INPUTS // 20))
async def test_the_executor_refuses_bad_plans_by_type_and_runs_the_good_ones(service: Service) -> None:
    started, address, log = service
    fuzzer, tally, started_at = Fuzzer(5), Tally(), time.monotonic()
    async with grpc.aio.insecure_channel(address) as channel:
        wanted = await good_tokens(channel)
        for index in range(NUM_INPUTS):
            try:
                await send_bad(channel, fuzzer)
                tally.outcomes["run"] += 1
            except grpc.aio.AioRpcError as error:
                tally.refused(error)
            if index % 20 == 0:
                assert await good_tokens(channel) == wanted
    print(f"\n{NUM_INPUTS} bad step streams in {time.monotonic() - started_at:.0f} s: {tally}")
    assert set(tally.outcomes) <= REASONS | {CLAIM, "run"}
    assert {"INVALID_ARGUMENT UNDECODABLE", "INVALID_ARGUMENT INVALID_PLAN", "FAILED_PRECONDITION STEP_GAP"} <= set(
        tally.outcomes
    )
    assert tally.outcomes[CLAIM] < NUM_INPUTS / 50
    assert started.poll() is None
    check_log(log)
    async with scheduling(address) as scheduler:
        await scheduler.until("connected")
        await check_exact(scheduler.client, 1)


@pytest.mark.timeout(max(120, NUM_INPUTS // 20))
async def test_bytes_at_the_executor_s_port_do_not_disturb_its_scheduler(service: Service) -> None:
    started, address, log = service
    num_files = psutil.Process(started.pid).num_fds()

    async def talk(seed: int) -> None:
        fuzzer = Fuzzer(seed)
        for _ in range(NUM_INPUTS // 16):
            await talk_to(address, fuzzer.talk(), is_rude=fuzzer.random.random() < 0.3)

    async with scheduling(address) as scheduler:
        await scheduler.until("connected")
        talking = asyncio.gather(*[talk(seed) for seed in range(16)])
        while not talking.done():
            await check_exact(scheduler.client, 1, max_tokens=40)
        await talking
        assert scheduler.loop.stats.num_connections == 1
    assert started.poll() is None
    async with asyncio.timeout(20):
        while psutil.Process(started.pid).num_fds() > num_files + 5:
            await asyncio.sleep(0.05)
    check_log(log)


def check_log(log: Path) -> None:
    """Nothing that comes in is a bug of the executor; a claim that the mock refuses is logged as a failed step."""
    lines = log.read_text(errors="replace").splitlines()
    assert [line for line in lines if '"level": "error"' in line and '"event": "step_failed"' not in line] == []
