"""The examples run as their first lines say, against a real scheduler with the mock executor."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everystop.client import ChatMessage, Client
from everystop.testing import serve_mock

ROOT = Path(__file__).parents[2]
CAPITAL = "The capital of France is"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve_mock() as running:
        yield running.address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address) as client:
        yield client


def output_of(*command: str, cwd: Path = ROOT) -> str:
    completed = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=90)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_python_async(address: str, client: Client) -> None:
    text = client.complete(CAPITAL, max_tokens=24, temperature=0).text
    lines = output_of(sys.executable, "examples/python_async.py", address).splitlines()
    assert len(lines) == 3
    assert f"{CAPITAL + text!r} (length, 24 tokens)" in lines


def test_python_sync(address: str, client: Client) -> None:
    text = client.complete(CAPITAL, max_tokens=16, temperature=0).text
    question = [ChatMessage("user", "Name a colour.")]
    answer = client.complete(question, max_tokens=16, temperature=0.8, seed=7, stop_strings=["\n"]).text
    output = output_of(sys.executable, "examples/python_sync.py", address)
    assert output.startswith(f"{text}\n{answer!r} (")
    assert "\nINVALID_ARGUMENT: sampling.temperature: is 1000" in output


@pytest.mark.skipif(shutil.which("npm") is None, reason="Node is not installed: no npm")
@pytest.mark.timeout(300)
def test_node(address: str, client: Client, tmp_path: Path) -> None:
    # A copy, so that nothing is left behind; the example finds the protocol two folders up.
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    folder = tmp_path / "examples" / "node"
    shutil.copytree(ROOT / "examples" / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    output_of("npm", "install", "--no-audit", "--no-fund", cwd=folder)
    text = client.complete(CAPITAL, max_tokens=16, temperature=0).text
    assert output_of("node", "generate.mjs", address, cwd=folder) == f"{text}\nFINISH_REASON_LENGTH, 16 tokens\n"
