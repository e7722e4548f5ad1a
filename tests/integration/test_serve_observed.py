"""`everystop serve` with everything on: real processes, one flag for each port, an executor that dies."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable

import psutil

from everystop.client import Client, Delta


def scraped(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    (value,) = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return float(value)


def test_each_service_has_a_port_and_a_death_leaves_a_line(unused_tcp_port_factory: Callable[[], int]) -> None:
    scheduler_port, executor_port = unused_tcp_port_factory(), unused_tcp_port_factory()
    service = subprocess.Popen(
        [
            *(
                sys.executable,
                "-m",
                "everystop",
                "serve",
                "--executor=mock",
                "--mock-step-ms=5",
                "--listen=127.0.0.1:0",
            ),
            *(f"--metrics-listen=127.0.0.1:{scheduler_port}", f"--executor-metrics-listen=127.0.0.1:{executor_port}"),
            *("--otlp-endpoint=http://127.0.0.1:1", "--log-format=json"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OTEL_SDK_DISABLED": "false"},
    )
    try:
        assert service.stdout is not None
        ready = next(line for line in service.stdout if "ready on" in line)
        address = re.findall(r"ready on (\S+:\d+):", ready)[0]
        with Client(address) as client:
            client.complete("hello", max_tokens=3, ignore_eos=True)
            assert scraped(scheduler_port, "everystop:generation_tokens_total") == 3
            assert scraped(executor_port, "everystop:executor_steps_total") == 3
            stream = client.generate("hello", max_tokens=3000, ignore_eos=True, request_id="in flight", timeout=60)
            next(event for event in stream if isinstance(event, Delta))
            children = psutil.Process(service.pid).children()
            (executor,) = [child for child in children if "executor_svc" in child.cmdline()]
            executor.kill()
            executor.wait(10)
            assert service.stderr is not None
            line = next(line for line in service.stderr if '"executor_lost"' in line)
            stream.close()
    finally:
        service.send_signal(signal.SIGINT)
        service.communicate(timeout=30)
    assert '"request_ids": ["in flight"]' in line
