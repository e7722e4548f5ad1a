"""Bad input to the scheduler's port: it lives, each refusal is typed, and good requests beside it are exact.

`EVERYSTOP_FUZZ_INPUTS=100000` sends so many.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from fuzzing import Fuzzer, Tally, num_inputs, talk_to
from google.protobuf.message import Message
from services import check_exact, process

from everystop.client import AsyncClient, Client
from everystop.scheduler.v1 import admin_pb2
from everystop.scheduler.v1 import inference_pb2 as pb

NUM_CALLERS = 24
NUM_INPUTS = num_inputs(3000)
_INFERENCE = "/everystop.scheduler.v1.InferenceService/"
_ADMIN = "/everystop.scheduler.v1.AdminService/"
METHODS: dict[str, type[Message]] = {
    _INFERENCE + "Generate": pb.GenerateRequest,
    _INFERENCE + "Tokenize": pb.TokenizeRequest,
    _INFERENCE + "Detokenize": pb.DetokenizeRequest,
    _INFERENCE + "GetModel": pb.GetModelRequest,
    _ADMIN + "GetStatus": admin_pb2.GetStatusRequest,
    _INFERENCE + "NoSuchMethod": pb.GenerateRequest,
    "/no.such.Service/Generate": pb.GenerateRequest,
}
WEIGHTS = (60, 10, 10, 3, 3, 1, 1)
GRPCS_OWN = {"UNIMPLEMENTED (gRPC)", "DEADLINE_EXCEEDED (gRPC)"}
"""An unknown method; a deadline, which most of the calls here have."""

Service = tuple[subprocess.Popen[str], str, Path]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """The scheduler's process, its address and its log."""
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        process("executor_svc", tmp_path, "--backend=mock", "--mock-step-ms=0.2", stderr=stderr) as (
            _,
            executor_address,
        ),
        process("scheduler_svc", tmp_path, f"--executor-address={executor_address}", stderr=stderr) as (
            started,
            address,
        ),
        Client(address) as client,
    ):
        while client.get_status().state != admin_pb2.SCHEDULER_STATE_SERVING:
            pass
        yield started, address, log


def good_request() -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="Hello",
        sampling=pb.SamplingParams(temperature=0.5, seed=7),
        stop=pb.StopConditions(max_tokens=8, stop_strings=["the"]),
        output=pb.OutputOptions(logprobs=1),
    )


def bad_input(fuzzer: Fuzzer, message_type: type[Message]) -> bytes:
    """Messages of any content, good ones with one wrong field, with a few wrong bytes, and no messages at all."""
    message = good_request() if message_type is pb.GenerateRequest else message_type()
    match fuzzer.random.randint(0, 4):
        case 0:
            message = message_type()
            fuzzer.fill(message, fuzzer.random.choice((0.2, 0.5, 0.9)))
        case 1 | 2 if message.DESCRIPTOR.fields:
            fuzzer.spoil(message)
        case 3:
            return fuzzer.garble(message.SerializeToString())
        case 4:
            return fuzzer.noise()
    return message.SerializeToString()


async def send(channel: grpc.aio.Channel, fuzzer: Fuzzer, tally: Tally) -> None:
    (method,) = fuzzer.random.choices(list(METHODS), WEIGHTS)
    content = bad_input(fuzzer, METHODS[method])
    call = channel.unary_stream(method)(content, timeout=fuzzer.random.choice((0.001, 0.05, *[5.0] * 18)))
    try:
        for _ in range(fuzzer.random.choice((1, 3, 30))):
            if await call.read() is grpc.aio.EOF:
                break
        tally.outcomes["answered"] += 1
    except grpc.aio.AioRpcError as error:
        tally.refused(error)
    finally:
        call.cancel()


async def check_beside(address: str, stopped: asyncio.Event) -> int:
    """Good requests, one after the other, until told to stop; how many."""
    async with AsyncClient(address, retry=None) as client:
        for num_requests in itertools.count():
            if stopped.is_set():
                return num_requests
            await check_exact(client, num_requests % 6, max_tokens=40)
    raise AssertionError


def check_log(log: Path) -> None:
    """Nothing that a client sends is an error of the service."""
    errors = [
        line
        for line in log.read_text(errors="replace").splitlines()
        if '"level": "error"' in line or "Traceback" in line
    ]
    assert errors == []


@pytest.mark.timeout(max(120, NUM_INPUTS // 20))
async def test_the_scheduler_refuses_bad_requests_by_type_and_serves_the_good_ones(service: Service) -> None:
    started, address, log = service
    tally, started_at = Tally(), time.monotonic()
    inputs = iter(range(NUM_INPUTS))
    stopped = asyncio.Event()

    async def call_again_and_again(channel: grpc.aio.Channel, seed: int) -> None:
        fuzzer = Fuzzer(seed)
        for _ in inputs:
            await send(channel, fuzzer, tally)

    async with grpc.aio.insecure_channel(address) as channel:
        beside = asyncio.create_task(check_beside(address, stopped))
        await asyncio.gather(*[call_again_and_again(channel, seed) for seed in range(NUM_CALLERS)])
        stopped.set()
        num_good = await beside
    print(f"\n{NUM_INPUTS} bad requests in {time.monotonic() - started_at:.0f} s beside {num_good} good ones: {tally}")

    assert sum(tally.outcomes.values()) == NUM_INPUTS
    untyped = {outcome for outcome in tally.outcomes if outcome.endswith("(gRPC)")}
    assert untyped <= GRPCS_OWN
    assert not [outcome for outcome in tally.outcomes if "INTERNAL" in outcome or "UNKNOWN" in outcome]
    assert {"INVALID_ARGUMENT INVALID_FIELD", "INVALID_ARGUMENT UNDECODABLE", "answered"} <= set(tally.outcomes)
    assert started.poll() is None
    await check_nothing_left(address)
    check_log(log)


async def check_nothing_left(address: str) -> None:
    async with AsyncClient(address, retry=None) as client, asyncio.timeout(20):
        while True:
            status = await client.get_status()
            if not status.num_running + status.num_waiting + status.blocks.num_used_blocks:
                return


@pytest.mark.timeout(max(120, NUM_INPUTS // 20))
async def test_bytes_at_the_scheduler_s_port_harm_nobody(service: Service) -> None:
    started, address, log = service
    stopped = asyncio.Event()
    beside = asyncio.create_task(check_beside(address, stopped))
    num_files = psutil.Process(started.pid).num_fds()

    async def talk(seed: int) -> None:
        fuzzer = Fuzzer(seed)
        for _ in range(NUM_INPUTS // 16):
            await talk_to(address, fuzzer.talk(), is_rude=fuzzer.random.random() < 0.3)

    started_at = time.monotonic()
    await asyncio.gather(*[talk(seed) for seed in range(16)])
    print(f"\n{NUM_INPUTS} connections that speak no gRPC in {time.monotonic() - started_at:.0f} s")
    stopped.set()
    assert await beside > 0
    assert started.poll() is None
    async with asyncio.timeout(20):
        while psutil.Process(started.pid).num_fds() > num_files + 5:
            await asyncio.sleep(0.05)
    await check_nothing_left(address)
    check_log(log)


@pytest.mark.parametrize("method", [_INFERENCE + "Generate", _INFERENCE + "Tokenize", _ADMIN + "Drain"])
async def test_bytes_that_are_no_message_are_refused_by_type(service: Service, method: str) -> None:
    tally = Tally()
    async with grpc.aio.insecure_channel(service[1]) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="can't be decoded") as refused:
            await channel.unary_stream(method)(b"\xff\xff").read()
    tally.refused(refused.value)
    assert set(tally.outcomes) == {"INVALID_ARGUMENT UNDECODABLE"}
