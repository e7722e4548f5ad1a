"""`everystop generate`, `chat` and `status` against a real scheduler with the mock executor."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from everystop.client import ChatMessage, Client
from everystop.commands import chat, generate, status
from everystop.testing import serve_mock

ENDLESS = ["--max-tokens", "60000", "--ignore-eos"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve_mock() as running:
        yield running.address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address) as client:
        yield client


def run(command: click.Command, address: str, *arguments: str, stdin: str | bytes = "") -> Result:
    return CliRunner().invoke(command, [*arguments, "--address", address], input=stdin)


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, so that it can get the signal of Ctrl-C."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-m", "everystop", *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def read_one(stream: Any) -> str:
    """Wait for the first character."""
    assert isinstance(stream, io.TextIOBase)
    return stream.read(1)


def test_generate_streams_the_text_and_sums_up(address: str, client: Client) -> None:
    expected = client.complete("Once upon", max_tokens=16, temperature=0)
    result = run(generate, address, "Once upon", "--max-tokens", "16")
    assert (result.exit_code, result.stdout) == (0, expected.text + "\n")
    assert result.stderr.startswith("16 tokens, cut off at the largest length, prompt of 9 tokens, first token after ")


def test_generate_prints_json(address: str, client: Client) -> None:
    arguments = ["--json", "--max-tokens", "4", "--temperature", "0.5", "--seed", "7", "--logprobs", "1"]
    result = run(generate, address, "Hello", *arguments, "--prompt-logprobs", "0")
    expected = client.complete("Hello", max_tokens=4, temperature=0.5, seed=7, logprobs=1, prompt_logprobs=0)
    printed = json.loads(result.stdout)
    assert (printed["text"], printed["seed"], printed["finish_reason"]) == (expected.text, 7, "length")
    assert [bytes(entry["token_bytes"]) for entry in printed["logprobs"]] == [
        entry.token_bytes for entry in expected.logprobs
    ]
    assert len(printed["prompt_logprobs"]) == 4


def test_generate_stops_where_told(address: str, client: Client) -> None:
    text = client.complete("Hello", max_tokens=32, temperature=0).text
    stop = text[8:11]
    result = run(generate, address, "Hello", "--max-tokens", "32", "--stop", stop)
    assert result.stdout == text[: text.index(stop)] + "\n"
    assert f"stopped at {stop!r}" in result.stderr


def test_generate_reads_the_prompt_from_standard_input(address: str, client: Client) -> None:
    expected = client.complete("two\nlines", max_tokens=8, temperature=0).text
    assert run(generate, address, "-", "--max-tokens", "8", stdin="two\nlines\n").stdout == expected + "\n"


def test_generate_refuses_standard_input_that_is_no_text(address: str) -> None:
    result = run(generate, address, "-", stdin=b"\xff")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: standard input is not UTF-8")


def test_generate_says_in_one_line_what_was_refused(address: str) -> None:
    result = run(generate, address, "Hello", "--top-p", "2")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: sampling.top_p: is 2, expected above 0 to 1 (INVALID_ARGUMENT)\n"


def test_generate_keeps_logprobs_for_json(address: str) -> None:
    result = run(generate, address, "Hello", "--logprobs", "1")
    assert result.exit_code == 2
    assert "need --json" in result.stderr


def test_generate_gives_up_in_time(address: str) -> None:
    result = run(generate, address, "Hello", *ENDLESS, "--timeout", "0.2")
    assert result.exit_code == 1
    assert result.stderr == "Error: the time is up (--timeout)\n"
    assert result.stdout.endswith("\n")


@pytest.mark.parametrize(("command", "arguments"), [(generate, ["Hello"]), (chat, []), (status, [])])
def test_says_that_nobody_is_there(command: click.Command, arguments: list[str]) -> None:
    result = run(command, "127.0.0.1:1", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: no scheduler at 127.0.0.1:1; start one with `everystop serve`\n"


def test_takes_the_address_from_the_environment() -> None:
    result = CliRunner().invoke(status, [], env={"EVERYSTOP_ADDRESS": "127.0.0.1:2"})
    assert "no scheduler at 127.0.0.1:2;" in result.stderr


def test_ctrl_c_ends_generate_and_its_request(address: str, client: Client) -> None:
    num_cancelled = client.get_status().counters.num_cancelled
    with started("generate", "Hello", "--address", address, *ENDLESS) as process:
        read_one(process.stdout)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "")
    while client.get_status().counters.num_cancelled == num_cancelled:
        pass


def test_chat_remembers_and_forgets(address: str, client: Client) -> None:
    opening, question, more = ChatMessage("system", "Rhyme."), ChatMessage("user", "Hi"), ChatMessage("user", "More")
    first = client.complete([opening, question], max_tokens=8, temperature=0).text
    both = [opening, question, ChatMessage("assistant", first), more]
    second = client.complete(both, max_tokens=8, temperature=0).text
    lines = "Hi\n\nMore\n/reset\n/help\nHi\n/exit\nnever sent\n"
    result = run(chat, address, "--system", "Rhyme.", "--max-tokens", "8", stdin=lines)
    assert (result.exit_code, result.stdout) == (0, f"{first}\n{second}\n{first}\n")
    assert "/reset forgets the conversation" in result.stderr


def test_chat_ends_with_its_input(address: str) -> None:
    assert run(chat, address, "--max-tokens", "1", stdin="Hi").exit_code == 0


def test_chat_fails_when_a_script_is_refused(address: str) -> None:
    result = run(chat, address, "--temperature", "1000", stdin="Hi\n")
    assert result.exit_code == 1
    assert "sampling.temperature" in result.stderr


def test_ctrl_c_stops_the_answer_but_not_the_chat(address: str) -> None:
    with started("chat", "--address", address, *ENDLESS) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            process.stdin.write("Hi\n")
            process.stdin.flush()
            read_one(process.stdout)
            process.send_signal(signal.SIGINT)
            process.stdout.readline()
        _, errors = process.communicate("/exit\n", timeout=30)
    assert process.returncode == 0
    assert errors.count("[stopped]") == 2


def test_status_speaks_in_words_or_json(address: str) -> None:
    words = run(status, address).stdout
    assert f"at {address} is serving, up " in words
    printed = json.loads(run(status, address, "--json").stdout)
    assert (printed["state"], printed["num_waiting"]) == ("SCHEDULER_STATE_SERVING", 0)
    assert printed["executor"]["backend"] == "mock"


def test_status_watches_until_ctrl_c(address: str) -> None:
    with started("status", "--address", address, "--watch", "--json", "--interval", "0.1") as process:
        assert process.stdout is not None
        uptimes = [json.loads(process.stdout.readline())["uptime_s"] for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert uptimes == sorted(set(uptimes))
