"""`everystop scheduler`: the scheduler as a process of its own."""

from __future__ import annotations

import asyncio
import faulthandler
import signal

import click

from everystop import log
from everystop.config import config_command
from everystop.options import ConfigError
from everystop.settings import SchedulerConfig


@config_command("scheduler", SchedulerConfig, help="Run the scheduler alone; it dials the executor.")
def scheduler(config: SchedulerConfig) -> None:
    """Run until SIGINT or SIGTERM."""
    log.configure(config.log_format, config.log_level)
    faulthandler.enable()  # a crash in native code leaves its stack
    try:
        asyncio.run(_run(config))
    except (OSError, ConfigError) as error:
        raise click.ClickException(str(error)) from error


async def _run(config: SchedulerConfig) -> None:
    from scheduler_svc import server  # grpc and the tokenizer load only when the process really serves

    running = await server.start(config)
    stopped = asyncio.Event()

    was_signalled = False

    def on_sigterm() -> None:
        """Drain; at the second signal, stop."""
        nonlocal was_signalled
        if was_signalled:  # not: it drains. A Drain and the signal that a container runtime sends next ask for the same
            stopped.set()
        else:
            was_signalled = True
            running.lifecycle.drain()

    event_loop = asyncio.get_running_loop()
    event_loop.add_signal_handler(signal.SIGTERM, on_sigterm)
    event_loop.add_signal_handler(signal.SIGINT, stopped.set)
    endings = [asyncio.create_task(event.wait()) for event in (stopped, running.lifecycle.drained)]
    await asyncio.wait({*endings, running.failed}, return_when=asyncio.FIRST_COMPLETED)
    for ending in endings:
        ending.cancel()
    if running.failed.done():
        running.failed.result()  # a bug: end loudly
    await running.stop()


if __name__ == "__main__":
    scheduler()
