"""`everystop scheduler`: the scheduler as a process of its own."""

from __future__ import annotations

import asyncio
import signal

from everystop import log
from everystop.config import config_command
from everystop.settings import SchedulerConfig


@config_command("scheduler", SchedulerConfig, help="Run the scheduler alone; it dials the executor.")
def scheduler(config: SchedulerConfig) -> None:
    """Run until SIGINT or SIGTERM."""
    log.configure(config.log_format, config.log_level)
    asyncio.run(_run(config))


async def _run(config: SchedulerConfig) -> None:
    from scheduler_svc import server  # grpc and the tokenizer load only when the process really serves

    stopped = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, stopped.set)
    running = await server.start(config)
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({stopping, running.failed}, return_when=asyncio.FIRST_COMPLETED)
    if running.failed.done():
        running.failed.result()  # a bug: end loudly
    await running.stop()


if __name__ == "__main__":
    scheduler()
