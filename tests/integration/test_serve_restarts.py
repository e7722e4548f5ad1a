"""`everystop serve` under load while its services die, hang and drain: real processes, every answer exact."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from everystop.client import AsyncClient, Completion, Delta, Event, Retry, completion_from_events

TIMEOUT_S = 60.0
NUM_STREAMS = 4
MAX_TOKENS = 300


class Serving:
    """`everystop serve` with the mock."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.address = ""
        self.logs: list[dict[str, Any]] = []
        """Lines of both services and of the command itself, as they come."""
        self._news = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            if line.startswith(b"{"):
                async with self._news:
                    self.logs.append(json.loads(line))
                    self._news.notify_all()

    async def wait_ready(self) -> None:
        """Until the banner is there."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if found := re.search(rb"ready on (\S+:\d+):", line):
                self.address = found[1].decode()
                return
        raise AssertionError(f"ended with {await self.process.wait()}")

    async def logged(self, event: str, **fields: object) -> dict[str, Any]:
        """The next line that has all of this, out of those that were not asked for yet."""

        def find() -> int | None:
            wanted = {"event": event, **fields}.items()
            return next((at for at, line in enumerate(self.logs) if wanted <= line.items()), None)

        async with asyncio.timeout(TIMEOUT_S), self._news:
            at = await self._news.wait_for(lambda: None if (found := find()) is None else found + 1) - 1
            line = self.logs[at]
            del self.logs[: at + 1]
        return line

    def child(self, name: str) -> psutil.Process:
        """One of the services, as it runs now."""
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if f"{name}_svc" in child.cmdline())

    async def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Signal, and the exit status."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        status = await asyncio.wait_for(self.process.wait(), TIMEOUT_S)
        await self._reading
        return status


@asynccontextmanager
async def serving(*flags: str) -> AsyncIterator[Serving]:
    command = [sys.executable, "-m", "everystop", "serve", "--executor=mock", "--listen=127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(*command, "--log-format=json", *flags, stdout=PIPE, stderr=PIPE)
    served = Serving(process)
    try:
        await asyncio.wait_for(served.wait_ready(), TIMEOUT_S)
        yield served
    finally:
        await served.end()


class Answer:
    """One answer while it comes."""

    def __init__(self, client: AsyncClient, index: int, *, prompt_words: int = 3, max_tokens: int = MAX_TOKENS) -> None:
        self._events: list[Event] = []
        self._has_more = asyncio.Event()
        prompt = f"stream {index} " * prompt_words
        self._stream = client.generate(prompt, max_tokens=max_tokens, temperature=index % 2, seed=index)
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> Completion:
        async for event in self._stream:
            self._events.append(event)
            self._has_more.set()
        return completion_from_events(self._events)

    @property
    def has_tokens(self) -> bool:
        """Whether its prompt is computed."""
        return any(isinstance(event, Delta) for event in self._events)

    async def flows(self) -> None:
        """Wait until there is more of it, tokens included."""
        self._has_more.clear()
        async with asyncio.timeout(TIMEOUT_S):
            while not (self._has_more.is_set() and self.has_tokens):
                self._has_more.clear()
                await self._has_more.wait()

    async def whole(self) -> tuple[str, tuple[int, ...]]:
        """All of it."""
        completion = await asyncio.wait_for(self._task, TIMEOUT_S)
        return completion.text, completion.token_ids


def answers(client: AsyncClient, **options: int) -> list[Answer]:
    return [Answer(client, index, **options) for index in range(NUM_STREAMS)]


async def whole(streams: list[Answer]) -> list[tuple[str, tuple[int, ...]]]:
    return await asyncio.gather(*(stream.whole() for stream in streams))


def connected(served: Serving) -> AsyncClient:
    return AsyncClient(served.address, retry=Retry(max_backoff_s=0.2))


async def test_the_executor_dies_in_decode_again_and_again() -> None:
    async with serving("--mock-step-ms=5") as served, connected(served) as client:
        expected = await whole(answers(client))
        streams = answers(client)
        for _ in range(3):
            await asyncio.gather(*(stream.flows() for stream in streams))
            pid = served.child("executor").pid
            served.child("executor").kill()
            ended = await served.logged("service_ended", service="executor", pid=pid)
            assert ended["reason"] == "was killed by SIGKILL"
            restarted = await served.logged("service_restarted", service="executor")
            assert restarted["pid"] == served.child("executor").pid != pid
        assert await whole(streams) == expected
        status = await client.get_status()
        assert (status.counters.num_executor_connections, status.blocks.num_used_blocks) == (4, 0)


async def test_the_executor_dies_in_prefill() -> None:
    # About half a second for each prompt, in twelve steps.
    async with serving("--mock-token-us=150") as served, connected(served) as client:
        options = {"prompt_words": 300, "max_tokens": 20}
        expected = await whole(answers(client, **options))
        num_steps = (await client.get_status()).counters.num_steps
        streams = answers(client, **options)
        while (await client.get_status()).counters.num_steps == num_steps:
            await asyncio.sleep(0)
        served.child("executor").kill()
        await served.logged("service_ended", service="executor")
        assert not any(stream.has_tokens for stream in streams)
        assert await whole(streams) == expected


async def test_every_executor_dies_sooner_or_later() -> None:
    # Each of them is good for a number of steps; none of the requests is to blame.
    flags = ("--mock-fail=die@120", "--max-losses=10")
    async with serving(*flags) as served, connected(served) as client:
        streams = answers(client)
        for _ in range(2):
            await served.logged("service_ended", service="executor", reason="was killed by SIGKILL")
        received = await whole(streams)
    async with serving() as served, connected(served) as client:
        assert await whole(answers(client)) == received


async def test_a_step_that_never_ends() -> None:
    async with serving("--mock-fail=hang@150", "--step-timeout-s=1") as served, connected(served) as client:
        stream = Answer(client, 1)
        hung = await served.logged("step_hung")
        assert len(hung["request_ids"]) == 1
        await served.logged("service_ended", service="executor", reason="exited with status 1")
        await served.logged("service_restarted", service="executor")
        received = await stream.whole()
    async with serving() as served, connected(served) as client:
        assert await Answer(client, 1).whole() == received


@pytest.mark.parametrize("name", ["executor", "scheduler"])
async def test_a_service_that_is_stopped_counts_as_hung(name: str) -> None:
    async with serving("--mock-step-ms=5", "--hung-after-s=2") as served, connected(served) as client:
        expected = await whole(answers(client))
        streams = answers(client)
        await asyncio.gather(*(stream.flows() for stream in streams))
        child = served.child(name)
        child.suspend()
        assert (await served.logged("service_hung"))["pid"] == child.pid
        await served.logged("service_restarted", service=name)
        assert await whole(streams) == expected


async def test_the_scheduler_dies_twice_and_is_back_at_its_address() -> None:
    async with serving("--mock-step-ms=5") as served, connected(served) as client:
        expected = await whole(answers(client))
        streams = answers(client)
        for _ in range(2):
            await asyncio.gather(*(stream.flows() for stream in streams))
            served.child("scheduler").kill()
            await served.logged("service_ended", service="scheduler", reason="was killed by SIGKILL")
            await served.logged("service_restarted", service="scheduler")
        assert await whole(streams) == expected


async def test_long_steps_are_not_hung() -> None:
    async with serving("--mock-step-ms=1500", "--hung-after-s=1") as served, connected(served) as client:
        await Answer(client, 0, max_tokens=2).whole()
        assert (await client.get_status()).counters.num_executor_connections == 1


async def test_an_executor_is_replaced_while_requests_finish_at_sigterm() -> None:
    async with serving("--mock-step-ms=5") as served, connected(served) as client:
        expected = await whole(answers(client))
        streams = answers(client)
        await asyncio.gather(*(stream.flows() for stream in streams))
        served.process.send_signal(signal.SIGTERM)
        await served.logged("draining")
        served.child("executor").kill()
        assert await whole(streams) == expected
        assert await served.end() == 0


async def test_a_drain_is_the_end_of_both() -> None:
    async with serving("--mock-step-ms=5") as served, connected(served) as client:
        stream = Answer(client, 0)
        await stream.flows()
        command = [sys.executable, "-m", "everystop"]
        options = {"stdout": PIPE, "stderr": subprocess.STDOUT}
        drain = await asyncio.create_subprocess_exec(*command, "drain", f"--address={served.address}", **options)
        said, _ = await drain.communicate()
        assert drain.returncode == 0
        assert b"takes no more requests and ends when the last request has finished" in said
        status = await asyncio.create_subprocess_exec(
            *command, "status", "--check", f"--address={served.address}", **options
        )
        said, _ = await status.communicate()
        assert status.returncode == 1
        assert b"is draining (asked to end, with 1 requests still in)" in said
        assert len((await stream.whole())[1]) > 0
        assert await asyncio.wait_for(served.process.wait(), TIMEOUT_S) == 0
