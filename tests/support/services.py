"""Schedulers and whole services for tests: inside of the test's event loop, or as processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulated_client import whole_answer

from everystop.client import AsyncClient
from everystop.client.requests import generate_request
from everystop.settings import SchedulerConfig
from scheduler_svc import server
from scheduler_svc.loop import Loop

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Scheduling:
    """A running scheduler, and a client of it that tries nothing again."""

    client: AsyncClient
    loop: Loop

    async def until(self, reason: str) -> None:
        """Return once `reason` is a part of why the state is what it is, be it for a moment."""
        async with asyncio.timeout(TIMEOUT_S):
            while reason not in self.loop.state_reason:
                await asyncio.sleep(0.001)

    async def until_idle(self) -> None:
        """Return once nothing runs or waits, and no block is in use."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                status = await self.client.get_status()
                if not status.num_running + status.num_waiting + status.blocks.num_used_blocks:
                    return


@asynccontextmanager
async def scheduling(executor_address: str, **settings: Any) -> AsyncIterator[Scheduling]:
    """A scheduler that dials the executor."""
    running = await server.start(SchedulerConfig(listen="127.0.0.1:0", executor_address=executor_address, **settings))
    try:
        async with AsyncClient(running.address, retry=None) as client:
            yield Scheduling(client, running.loop)
    finally:
        await running.stop()


async def check_exact(client: AsyncClient, index: int, max_tokens: int = 150) -> None:
    """Ask for an answer of a mock without ends, and compare it with the language's own."""
    prompt = list(f"stream {index} ".encode() * (index + 1))
    options: Any = {"max_tokens": max_tokens, "temperature": float(index % 2), "seed": index}
    answer = await client.complete(prompt, **options)
    wanted = whole_answer(generate_request(prompt, options), eos_rate=0.0)
    assert list(answer.token_ids) == wanted.token_ids
    assert answer.text == wanted.text


@contextmanager
def process(module: str, folder: Path, *flags: str, stderr: Any = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`python -m module` on a free port; yields it and its address once it listens. Killed in the end."""
    file = folder / f"{module}.address"
    command = [sys.executable, "-m", module, "--listen=127.0.0.1:0", f"--address-file={file}", *flags]
    with subprocess.Popen(command, stderr=stderr, text=True) as started:
        try:
            while not file.exists():
                assert started.poll() is None, f"{module} ended with {started.returncode}"
            yield started, file.read_text()
        finally:
            started.kill()
            file.unlink(missing_ok=True)
