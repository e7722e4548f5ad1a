"""`everystop executor`: the executor as a process of its own. The only place that chooses a backend."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from typing import NoReturn

import click

from everystop import log
from everystop.config import config_command
from everystop.errors import ServiceError
from everystop.options import ConfigError
from everystop.settings import ExecutorConfig
from executor_svc import server
from executor_svc.backend import Backend

_DUMP_TIMEOUT_S = 2.0
"""How long writing the stacks of a process that hangs may take."""


@config_command("executor", ExecutorConfig, help="Run the executor alone; it waits for a scheduler.")
def executor(config: ExecutorConfig) -> None:
    """Load the model, then serve until SIGINT or SIGTERM. The port opens when the model is loaded."""
    log.configure(config.log_format, config.log_level)
    faulthandler.enable()  # a crash in native code leaves its stack
    try:
        is_broken = asyncio.run(_run(config, load_backend(config)))
    except ServiceError as error:
        raise click.ClickException(error.message) from error
    except (OSError, ConfigError) as error:
        raise click.ClickException(str(error)) from error
    if is_broken:
        raise click.ClickException("the backend is broken; the log says why")


def load_backend(config: ExecutorConfig) -> Backend:
    """The backend that `config` names, loaded. Raises ServiceError when it can't be."""
    # Imported here: each brings libraries that the others must not load.
    if config.backend == "mock":
        from executor_svc.mock import MockBackend

        return MockBackend(config)
    from executor_svc.model import threads

    threads.configure_environment(config.threads)  # before torch is imported, which reads it once
    from executor_svc.model import runner

    return runner.load(config)


async def _run(config: ExecutorConfig, backend: Backend) -> bool:
    """Serve until told to stop; True when the backend broke."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signal_number, stopped.set)
    running = await server.start(config, backend)
    works = stopped.wait(), running.wait_broken(), running.wait_hung()
    stopping, breaking, hanging = tasks = [asyncio.create_task(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if hanging.done() and not stopping.done():
        _end_hung()
    await running.stop()
    is_broken = breaking.done()
    for task in tasks:
        task.cancel()
    return is_broken


def _end_hung() -> NoReturn:
    """End the process at once: the thread that hangs can hold up everything that an orderly end would do."""
    log.flush()
    signal.setitimer(signal.ITIMER_REAL, _DUMP_TIMEOUT_S)  # SIGALRM ends it when nobody reads the stacks
    faulthandler.dump_traceback()  # of all threads: where it hangs
    os._exit(1)


if __name__ == "__main__":
    executor()
