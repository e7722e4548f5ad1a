"""`everystop serve`: both services on one machine, as children of one command."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from grpc_health.v1 import health_pb2, health_pb2_grpc

from everystop.channel import client_channel, wait_for_address, write_address_file
from everystop.child import ChildExitedError, Children
from everystop.config import CONFIG_ENVVAR, build, config_option, options, to_flags
from everystop.options import settings
from everystop.scheduler.v1 import inference_pb2, inference_pb2_grpc
from everystop.settings import ExecutorConfig, SchedulerConfig

_GRACE_S = 4.0
"""How long a service may take to stop, requests aside."""
_DEFAULT_ADDRESS = "127.0.0.1:50051"
_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_SHARED = ({setting.name for setting in settings(SchedulerConfig)} - {"metrics_listen"}) & {
    setting.name for setting in settings(ExecutorConfig)
}
"""Settings of both: one flag, and the executor gets what the scheduler has. Each has its own port for metrics."""


def _serve(**values: Any) -> None:
    scheduler = build("scheduler", SchedulerConfig, values)
    shared = {name: getattr(scheduler, name) for name in _SHARED}
    executor = build("executor", ExecutorConfig, values, **shared | {"listen": "127.0.0.1:0"})
    try:
        asyncio.run(_run(scheduler, executor))
    except ChildExitedError as error:
        raise click.ClickException(f"{error}; its last lines above say why.") from error


serve = click.Command(
    "serve",
    callback=_serve,
    params=[
        config_option(),
        *options(
            "executor", flags={"backend": "--executor", "metrics_listen": "--executor-metrics-listen"}, without=_SHARED
        ),
        *options("scheduler", without={"executor_address"}),
    ],
    help="Run scheduler and executor on this machine, until Ctrl-C (at once) or SIGTERM (requests finish).\n\n"
    "The executor listens on a free port of the loopback; settings that both have are the scheduler's.",
)


async def _run(scheduler: SchedulerConfig, executor: ExecutorConfig) -> None:
    """Run both until a signal. Raises `ChildExitedError` when one of them ends by itself."""
    children = Children(_child_environment())
    this_task = asyncio.current_task()
    assert this_task is not None
    interrupts = _Interrupts(this_task, children)
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, interrupts, signal_number)
    try:
        address = await _start(children, scheduler, executor)
        write_address_file(scheduler.address_file, address)
        await children.until(asyncio.Event().wait())
    except asyncio.CancelledError:
        click.echo("Stopping.", err=True)
    finally:
        interrupts.is_stopping = True
        drain_grace_s = scheduler.drain_grace_s if interrupts.signal_number is signal.SIGTERM else 0.0
        await children.stop(drain_grace_s + _GRACE_S, interrupts.signal_number)


class _Interrupts:
    """The first signal cancels the task; once it is stopping, another one kills the children.

    The services get the signal too: SIGINT ends requests, SIGTERM lets them finish.
    """

    def __init__(self, task: asyncio.Task[None], children: Children) -> None:
        self._task = task
        self._children = children
        self.is_stopping = False
        self.signal_number = signal.SIGINT

    def __call__(self, signal_number: signal.Signals) -> None:
        if self.is_stopping:
            self._children.kill()
        else:
            self.is_stopping = True
            self.signal_number = signal_number
            self._task.cancel()


async def _start(children: Children, scheduler: SchedulerConfig, executor: ExecutorConfig) -> str:
    """Start both, wait until they serve, say so, and return the address for clients."""
    with tempfile.TemporaryDirectory(prefix="everystop-") as folder:
        executor_file, scheduler_file = Path(folder, "executor"), Path(folder, "scheduler")
        click.echo(f"Starting the executor ({executor.backend}, model {executor.model}) and the scheduler …", err=True)
        executor = dataclasses.replace(executor, address_file=str(executor_file))
        await children.start("executor", "executor_svc", to_flags(executor))
        executor_address = await children.until(wait_for_address(executor_file))
        scheduler = dataclasses.replace(scheduler, executor_address=executor_address, address_file=str(scheduler_file))
        await children.start("scheduler", "scheduler_svc", to_flags(scheduler))
        address = await children.until(wait_for_address(scheduler_file))
    model = await children.until(_wait_until_serving(_reachable(address)))
    click.echo(_banner(address, model))
    return address


async def _wait_until_serving(address: str) -> inference_pb2.GetModelResponse:
    async with client_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        watch = health_pb2_grpc.HealthStub(channel).Watch  # type: ignore[attr-defined]  # the stubs lack it
        async for response in watch(request, wait_for_ready=True):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                break
        return await inference_pb2_grpc.InferenceServiceStub(channel).GetModel(inference_pb2.GetModelRequest())


def _banner(address: str, model: inference_pb2.GetModelResponse) -> str:
    command = "everystop" if shutil.which("everystop") else os.path.relpath(Path(sys.executable).with_name("everystop"))
    reachable = _reachable(address)
    option = "" if reachable == _DEFAULT_ADDRESS else f" --address {reachable}"
    ready = f"Everystop is ready on {address}: {model.name} ({model.dtype}, up to {model.max_model_len} tokens)."
    attempt = f'{command} generate "The capital of France is" --max-tokens 16{option}'
    return f"\n{click.style(ready, bold=True)}\n\n  Try:   {attempt}\n  Stop:  Ctrl-C\n"


def _reachable(address: str) -> str:
    """Where this machine reaches what listens on `address`."""
    host, _, port = address.rpartition(":")
    loopback = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)  # noqa: S104  # asks, binds nothing
    return f"{loopback}:{port}"


def _child_environment() -> dict[str, str]:
    """This environment without settings: the children get all of theirs as flags."""
    prefixes = ("EVERYSTOP_SCHEDULER_", "EVERYSTOP_EXECUTOR_")
    return {key: value for key, value in os.environ.items() if key != CONFIG_ENVVAR and not key.startswith(prefixes)}
