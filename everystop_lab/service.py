"""Starts what is measured: the whole service, and the bare loop, as processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from everystop.channel import wait_for_address
from everystop.child import Children
from everystop_lab.bare import Order

_GRACE_S = 10.0


@asynccontextmanager
async def serving(flags: Sequence[str]) -> AsyncIterator[str]:
    """Run `everystop serve` with `flags` on a free port; yields its address once it serves."""
    children = Children(os.environ, stdout=sys.stderr)  # ours is for the figures
    with tempfile.TemporaryDirectory(prefix="everystop-bench-") as folder:
        file = Path(folder, "address")
        arguments = ["serve", "--listen=127.0.0.1:0", f"--address-file={file}", "--log-level=warning", *flags]
        try:
            await children.start("service", "everystop", arguments)
            yield await children.until(wait_for_address(file))
        finally:
            await children.stop(_GRACE_S)


class BareProcess:
    """A bare loop with its backend loaded."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def tokens_per_s(self, order: Order) -> float:
        """Run one order. Raises RuntimeError when the process dies of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(order.to_json().encode() + b"\n")
        await self._process.stdin.drain()
        answer = await self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the bare loop died; its last lines above say why")
        run = json.loads(answer)
        return float(run["num_output_tokens"] / run["seconds"])


@asynccontextmanager
async def bare_loop(flags: Sequence[str]) -> AsyncIterator[BareProcess]:
    """Run `everystop_lab.bare` with the executor's `flags`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "everystop_lab.bare", "--log-level=warning", *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield BareProcess(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # it ends at the end of its input
        try:
            await asyncio.wait_for(process.wait(), _GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()
