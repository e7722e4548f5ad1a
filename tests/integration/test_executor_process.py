"""The executor as a process of its own."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from everystop import channel, plan_codec
from everystop.executor.v1 import executor_pb2 as pb
from everystop.executor.v1 import executor_pb2_grpc as pb_grpc
from everystop.plan import Hello, NewSequence, SamplingParams, StepPlan


@contextmanager
def executor_process(tmp_path: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A mock executor on a free port; yields the process and its address once it listens."""
    address_file = tmp_path / "address"
    command = [sys.executable, "-m", "executor_svc", "--backend=mock", "--listen=127.0.0.1:0"]
    command += [f"--address-file={address_file}", "--log-format=json", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = next((line for line in process.stderr if "executor_listening" in line), None)
            assert line is not None, f"the executor ended with {process.wait()}"
            assert json.loads(line)["address"] == address_file.read_text()
            yield process, address_file.read_text()
        finally:
            process.kill()


class Stream:
    """The scheduler's end of a step stream, after the handshake."""

    def __init__(self, grpc_channel: grpc.Channel) -> None:
        self._requests: queue.SimpleQueue[pb.ExecuteStepsRequest | None] = queue.SimpleQueue()
        self._requests.put(pb.ExecuteStepsRequest(hello=plan_codec.encode_hello(Hello(4, 64))))
        self._responses = pb_grpc.ExecutorServiceStub(grpc_channel).ExecuteSteps(iter(self._requests.get, None))
        self.executor = next(self._responses).executor

    def send(self, plan: StepPlan) -> None:
        self._requests.put(pb.ExecuteStepsRequest(plan=plan_codec.encode_plan(plan)))

    def send_first_plan(self) -> None:
        admissions = [NewSequence(0, "request", 0, [1], 1, 0, [0], SamplingParams())]
        epoch = self.executor.epoch
        self.send(
            StepPlan(1, epoch, admissions=admissions, chunk_slots=[0], chunk_num_tokens=[1], num_seqs=1, num_tokens=1)
        )

    def result(self) -> pb.StepResult:
        return next(self._responses).result

    def lost(self) -> grpc.StatusCode:
        """How the stream ends instead of bringing a result."""
        with pytest.raises(grpc.RpcError) as lost:
            next(self._responses)
        self._requests.put(None)
        code: grpc.StatusCode = lost.value.code()
        return code


def test_the_executor_serves_on_the_port_that_it_wrote_and_ends_at_sigterm(tmp_path: Path) -> None:
    with executor_process(tmp_path) as (process, address), channel.sync_channel(address) as grpc_channel:
        stream = Stream(grpc_channel)
        assert stream.executor.backend == "mock"
        process.send_signal(signal.SIGTERM)
        assert stream.lost() is grpc.StatusCode.UNAVAILABLE
        assert process.wait(timeout=10) == 0


def test_a_hanging_step_does_not_hold_up_the_end(tmp_path: Path) -> None:
    # The second plan is there before the first step ends, so the second step hangs when the first result arrives.
    with executor_process(tmp_path, "--mock-fail=slow@1:300,hang@2") as (process, address):
        with channel.sync_channel(address) as grpc_channel:
            stream = Stream(grpc_channel)
            stream.send_first_plan()
            stream.send(StepPlan(2, stream.executor.epoch, num_seqs=1, num_tokens=1))
            assert stream.result().step_id == 1
            process.send_signal(signal.SIGTERM)
            assert stream.lost() is grpc.StatusCode.UNAVAILABLE
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None
        assert "step_abandoned" in process.stderr.read()


def test_a_step_over_the_limit_ends_the_process_and_leaves_a_line(tmp_path: Path) -> None:
    with executor_process(tmp_path, "--mock-fail=hang@1", "--step-timeout-s=0.3") as (process, address):
        with channel.sync_channel(address) as grpc_channel:
            stream = Stream(grpc_channel)
            stream.send_first_plan()
            assert stream.lost() is grpc.StatusCode.UNAVAILABLE
        assert process.wait(timeout=20) == 1
        assert process.stderr is not None
        errors = process.stderr.read()
    (line,) = [json.loads(line) for line in errors.splitlines() if "step_hung" in line]
    assert (line["step_id"], line["limit_s"], line["request_ids"]) == (1, 0.3, ["request"])
    assert "in execute" in errors  # where it hung


def test_a_step_within_the_limit_is_left_alone(tmp_path: Path) -> None:
    with executor_process(tmp_path, "--mock-fail=slow@1:1000", "--step-timeout-s=10") as (process, address):
        with channel.sync_channel(address) as grpc_channel:
            stream = Stream(grpc_channel)
            stream.send_first_plan()
            assert stream.result().step_id == 1
            process.send_signal(signal.SIGTERM)
            assert stream.lost() is grpc.StatusCode.UNAVAILABLE
        assert process.wait(timeout=20) == 0


def test_dying_on_demand_is_like_being_killed(tmp_path: Path) -> None:
    with executor_process(tmp_path, "--mock-fail=die@1") as (process, address):
        with channel.sync_channel(address) as grpc_channel:
            stream = Stream(grpc_channel)
            stream.send_first_plan()
            assert stream.lost() is grpc.StatusCode.UNAVAILABLE
        assert process.wait(timeout=10) == -signal.SIGKILL


def test_a_wrong_setting_is_one_clear_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "executor_svc", "--backend=mock", "--mock-fail=explode@1"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert finished.returncode == 1
    assert finished.stderr.startswith("Error: mock_fail: 'explode@1' is not")
    assert "Traceback" not in finished.stderr


def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    with executor_process(tmp_path) as (_, address):
        command = [sys.executable, "-m", "executor_svc", "--backend=mock", f"--listen={address}"]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert finished.returncode == 1
    assert f"cannot listen on {address}" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_the_mock_executor_loads_no_torch(tmp_path: Path) -> None:
    script = f"""
import asyncio, sys
from everystop.settings import ExecutorConfig
from executor_svc import __main__, server

async def main():
    config = ExecutorConfig(backend="mock", listen="127.0.0.1:0", address_file={str(tmp_path / "address")!r})
    running = await server.start(config, __main__.load_backend(config))
    await running.stop()

asyncio.run(main())
print(sorted(sys.modules.keys() & {{"torch", "transformers", "triton", "executor_svc.model"}}))
"""
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout.splitlines()[-1] == "[]"
