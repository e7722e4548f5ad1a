import subprocess
import sys

import pytest

from everystop.health import is_serving
from everystop.testing.served import MockService

INFERENCE = "everystop.scheduler.v1.InferenceService"


def test_a_serving_service_is_seen(everystop_server: MockService) -> None:
    assert is_serving(everystop_server.address, INFERENCE)
    assert is_serving(everystop_server.executor_address, "everystop.executor.v1.ExecutorService")


def test_an_unknown_service_is_not_serving(everystop_server: MockService) -> None:
    assert not is_serving(everystop_server.address, "everystop.scheduler.v1.NoSuchService")


def test_nothing_there_is_not_serving() -> None:
    assert not is_serving("127.0.0.1:1", INFERENCE)


@pytest.mark.parametrize(("service", "status"), [(INFERENCE, 0), ("no.such.Service", 1)])
def test_the_command_answers_with_its_exit_status(everystop_server: MockService, service: str, status: int) -> None:
    command = [sys.executable, "-m", "everystop.health", everystop_server.address, service]
    assert subprocess.run(command, check=False, timeout=30).returncode == status
