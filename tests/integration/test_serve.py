import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from everystop.channel import sync_channel
from everystop.client import Client
from everystop.scheduler.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

Serve = Callable[..., "Served"]


class Served:
    """`everystop serve` in the background."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "everystop", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
            start_new_session=True,
        )

    def wait_ready(self) -> str:
        """The whole banner."""
        assert self.process.stdout is not None
        banner = ""
        while "Stop:" not in banner:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            banner += line
        return banner

    def children(self) -> dict[str, psutil.Process]:
        """The services, by their module."""
        found = psutil.Process(self.process.pid).children()
        return {name: child for child in found for name in ("executor_svc", "scheduler_svc") if name in child.cmdline()}

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def finish(self) -> tuple[int, str]:
        """Exit status and all that went to stderr."""
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


def address_in(banner: str) -> str:
    found = re.search(r"ready on (\S+:\d+):", banner)
    assert found, banner
    return found[1]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts it, by default with the mock and on a free port; whatever is left of it afterwards is killed."""
    started: list[Served] = []

    def start(*arguments: str, env: dict[str, str] | None = None) -> Served:
        defaults = ["--executor", "mock", "--listen", "127.0.0.1:0"]
        started.append(Served([*defaults, *arguments], env or {}))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
            served.process.communicate()


def status_of(address: str) -> admin_pb2.GetStatusResponse:
    with sync_channel(address) as channel:
        return admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=10)


def assert_all_gone(processes: dict[str, psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes.values(), timeout=10)
    assert alive == []


def test_it_serves_and_says_how_to_try_it(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "address"
    served = serve("--address-file", str(file))
    banner = served.wait_ready()
    address = address_in(banner)
    assert f"--address {address}" in banner
    with sync_channel(address) as channel:
        request = inference_pb2.GenerateRequest(text="Hello", stop=inference_pb2.StopConditions(max_tokens=3))
        events = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=10))
    assert events[-1].finished.usage.num_output_tokens == 3
    assert file.read_text() == address


def test_the_command_in_the_banner_works(serve: Serve) -> None:
    banner = serve().wait_ready()
    (line,) = [line for line in banner.splitlines() if "Try:" in line]
    arguments = line.partition("generate")[2].replace('"', "").split()
    prompt, options = " ".join(arguments[:-4]), arguments[-4:]
    command = [sys.executable, "-m", "everystop", "generate", prompt, *options]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip()


def test_the_mock_is_ready_within_two_seconds(serve: Serve) -> None:
    # Up to five tries: the machine may be busy with other things.
    durations_s: list[float] = []
    while min(durations_s, default=9.0) >= 2.0 and len(durations_s) < 5:
        served = serve()
        served.wait_ready()
        durations_s.append(time.monotonic() - served.started_at)
        served.signal(signal.SIGTERM)
        served.finish()
    assert min(durations_s) < 2.0, durations_s


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_both_and_is_no_error(serve: Serve, number: signal.Signals) -> None:
    served = serve("--log-format", "json")
    served.wait_ready()
    children = served.children()
    assert set(children) == {"executor_svc", "scheduler_svc"}
    asked_at = time.monotonic()
    served.signal(number)
    status, errors = served.finish()
    assert status == 0
    assert time.monotonic() - asked_at < 5
    assert "Traceback" not in errors
    assert {json.loads(line)["level"] for line in errors.splitlines() if line.startswith("{")} == {"info"}
    assert_all_gone(children)


@pytest.mark.parametrize(("number", "is_finished"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_sigterm_lets_requests_finish(serve: Serve, number: signal.Signals, is_finished: bool) -> None:
    served = serve("--mock-step-ms", "20")
    with sync_channel(address_in(served.wait_ready())) as channel:
        request = inference_pb2.GenerateRequest(text="Hello", stop=inference_pb2.StopConditions(max_tokens=50))
        events = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=30)
        assert next(events).HasField("accepted")
        served.signal(number)
        if is_finished:
            assert list(events)[-1].finished.usage.num_output_tokens == 50
        else:
            with pytest.raises(grpc.RpcError) as broken:
                list(events)
            assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
    assert served.finish()[0] == 0


def test_a_drain_without_requests_ends_it_at_once(serve: Serve) -> None:
    served = serve("--drain-grace-s", "1000")
    address = address_in(served.wait_ready())
    command = [sys.executable, "-m", "everystop", "status", "--check", "--address", address]
    assert subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    children = served.children()
    with Client(address) as client:
        assert client.drain(timeout=10) == 0
    assert served.finish()[0] == 0
    assert_all_gone(children)


def test_a_second_signal_kills(serve: Serve) -> None:
    served = serve()
    served.wait_ready()
    children = served.children()
    children["scheduler_svc"].suspend()  # it can't answer the request to stop
    asked_at = time.monotonic()
    served.signal(signal.SIGINT)
    assert served.process.stderr is not None
    while "Stopping." not in served.process.stderr.readline():
        pass
    served.signal(signal.SIGINT)
    assert served.finish()[0] == 0
    assert time.monotonic() - asked_at < 3
    assert_all_gone(children)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_no_service_outlives_it(serve: Serve) -> None:
    served = serve()
    served.wait_ready()
    children = served.children()
    served.process.kill()
    served.process.communicate()
    assert_all_gone(children)


def test_a_service_that_cannot_start_ends_it(serve: Serve) -> None:
    taken = address_in(serve().wait_ready())
    second = serve("--listen", taken)
    status, errors = second.finish()
    assert status == 1
    assert taken in errors
    assert "the scheduler exited with status" in errors


def test_both_services_get_their_settings(serve: Serve, tmp_path: Path) -> None:
    toml = tmp_path / "everystop.toml"
    toml.write_text('[scheduler]\nbatching = "static"\nmax_num_seqs = 5\n[executor]\nblock_size = 8\nnum_blocks = 77\n')
    env = {"EVERYSTOP_EXECUTOR_NUM_BLOCKS": "99", "EVERYSTOP_SCHEDULER_MAX_NUM_SEQS": "6"}
    served = serve("--config", str(toml), "--max-num-seqs", "7", env=env)
    status = status_of(address_in(served.wait_ready()))
    assert (status.knobs.batching, status.knobs.max_num_seqs) == ("static", 7)
    assert (status.blocks.block_size, status.blocks.num_blocks) == (8, 99)


def test_large_limits_of_the_scheduler_are_followed(serve: Serve) -> None:
    served = serve("--max-num-seqs", "300", "--max-num-batched-tokens", "9000", "--max-model-len", "5000")
    knobs = status_of(address_in(served.wait_ready())).knobs
    assert (knobs.max_num_seqs, knobs.max_num_batched_tokens, knobs.max_model_len) == (300, 9000, 5000)


def test_a_wrong_setting_is_refused_before_anything_starts(serve: Serve) -> None:
    status, errors = serve("--executor", "mock", "--watermark", "2").finish()
    assert status == 2
    assert "--watermark" in errors
    assert "Starting" not in errors


def test_clients_on_all_interfaces(serve: Serve) -> None:
    served = serve("--listen", "0.0.0.0:0")
    banner = served.wait_ready()
    address = address_in(banner)
    assert address.startswith("0.0.0.0:")
    reachable = "127.0.0.1:" + address.rpartition(":")[2]
    assert f"--address {reachable}" in banner
    with grpc.insecure_channel(reachable) as channel:
        grpc.channel_ready_future(channel).result(timeout=10)
