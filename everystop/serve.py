"""`everystop serve`: both services on one machine, as children of one command."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from everystop import log
from everystop.channel import client_channel, reachable, write_address_file
from everystop.child import ChildExitedError
from everystop.config import CONFIG_ENVVAR, build, config_option, options, to_flags
from everystop.options import settings
from everystop.scheduler.v1 import inference_pb2, inference_pb2_grpc
from everystop.settings import ExecutorConfig, SchedulerConfig
from everystop.supervision import Service, SupervisedProcess, free_port

T = TypeVar("T")

_GRACE_S = 4.0
"""How long a service may take to stop, requests aside."""
_DEFAULT_ADDRESS = "127.0.0.1:50051"
_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_SHARED = ({setting.name for setting in settings(SchedulerConfig)} - {"metrics_listen"}) & {
    setting.name for setting in settings(ExecutorConfig)
}
"""Settings of both: one flag, and the executor gets what the scheduler has. Each has its own port for metrics."""


def _serve(hung_after_s: float, **values: Any) -> None:
    scheduler = build("scheduler", SchedulerConfig, values)
    shared = {name: getattr(scheduler, name) for name in _SHARED}
    executor = build("executor", ExecutorConfig, values, **shared)
    log.configure(scheduler.log_format, scheduler.log_level)
    try:
        asyncio.run(_run(scheduler, executor, hung_after_s))
    except OSError as error:
        raise click.ClickException(str(error)) from error
    except ChildExitedError as error:
        if error.returncode == 0:  # a drain
            return
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
        click.Option(
            ["--hung-after-s"],
            type=click.FloatRange(0.1, 1e6),
            default=10.0,
            show_default=True,
            help="Seconds without an answer to health checks after which a service is killed and started again.",
        ),
    ],
    help="Run scheduler and executor on this machine, until Ctrl-C (at once) or SIGTERM (requests finish).\n\n"
    "A service that ends or hangs is started again. The executor listens on a free port of the loopback; settings that "
    "both have are the scheduler's.",
)


async def _run(scheduler: SchedulerConfig, executor: ExecutorConfig, hung_after_s: float) -> None:
    """Run both until a signal. Raises `ChildExitedError` when one can't be kept, or the scheduler has drained."""
    with tempfile.TemporaryDirectory(prefix="everystop-") as folder:
        services = _Services.of(scheduler, executor, Path(folder), hung_after_s)
        this_task = asyncio.current_task()
        assert this_task is not None
        interrupts = _Interrupts(this_task, services)
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signal_number, interrupts, signal_number)
        try:
            click.echo(
                f"Starting the executor ({executor.backend}, model {executor.model}) and the scheduler …", err=True
            )
            model = await services.start()
            click.echo(_banner(services.scheduler.address, model))
            write_address_file(scheduler.address_file, services.scheduler.address)
            await services.until(asyncio.Event().wait())
        except asyncio.CancelledError:
            click.echo("Stopping.", err=True)
        finally:
            interrupts.is_stopping = True
            drain_grace_s = scheduler.drain_grace_s if interrupts.signal_number is signal.SIGTERM else 0.0
            await services.stop(interrupts.signal_number, drain_grace_s + _GRACE_S)


@dataclass(frozen=True, slots=True)
class _Services:
    """Both, the executor first. Each is started again when it ends or hangs."""

    executor: SupervisedProcess
    scheduler: SupervisedProcess

    @classmethod
    def of(cls, scheduler: SchedulerConfig, executor: ExecutorConfig, folder: Path, hung_after_s: float) -> Self:
        """Neither runs yet; `folder` is for files of theirs."""
        executor = dataclasses.replace(executor, listen=f"127.0.0.1:{free_port()}")
        host, _, port = scheduler.listen.rpartition(":")
        listen = scheduler.listen if int(port) else f"{host}:{free_port()}"
        scheduler = dataclasses.replace(scheduler, listen=listen, executor_address=executor.listen)

        def supervised(
            name: str, config: ExecutorConfig | SchedulerConfig, *, ends_with_success: bool
        ) -> SupervisedProcess:
            return SupervisedProcess(
                Service(
                    name=name,
                    module=f"{name}_svc",
                    flags=to_flags(dataclasses.replace(config, address_file="")),
                    listen=config.listen,
                    address_file=folder / name,
                    environment=_child_environment(),
                    hung_after_s=hung_after_s,
                    ends_with_success=ends_with_success,
                )
            )

        return cls(
            supervised("executor", executor, ends_with_success=False),
            supervised("scheduler", scheduler, ends_with_success=True),
        )

    async def start(self) -> inference_pb2.GetModelResponse:
        """Start both and wait until they serve. Raises ChildExitedError when one of them ends instead."""
        await self.executor.start()
        await self.executor.until(self.scheduler.start())
        return await self.until(_wait_until_serving(reachable(self.scheduler.address)))

    async def until(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`. Raises ChildExitedError when one of them is given up first."""
        return await self.executor.until(self.scheduler.until(work))

    async def stop(self, signal_number: signal.Signals, grace_s: float) -> None:
        """Ask the scheduler to end, with the executor at its side until it has, and then the executor."""
        await self.scheduler.stop(signal_number, grace_s)
        await self.executor.stop(signal_number, _GRACE_S)

    def kill(self) -> None:
        """Both, at once."""
        self.scheduler.kill_for_good()
        self.executor.kill_for_good()


class _Interrupts:
    """The first signal cancels the task; once it is stopping, another one kills the services.

    The services get the signal too: SIGINT ends requests, SIGTERM lets them finish.
    """

    def __init__(self, task: asyncio.Task[None], services: _Services) -> None:
        self._task = task
        self._services = services
        self.is_stopping = False
        self.signal_number = signal.SIGINT

    def __call__(self, signal_number: signal.Signals) -> None:
        if self.is_stopping:
            self._services.kill()
        else:
            self.is_stopping = True
            self.signal_number = signal_number
            self._task.cancel()


async def _wait_until_serving(address: str) -> inference_pb2.GetModelResponse:
    async with client_channel(address) as channel:
        while True:
            try:
                await _wait_until_healthy(channel)
                return await inference_pb2_grpc.InferenceServiceStub(channel).GetModel(inference_pb2.GetModelRequest())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:  # it has died and will be back
                    raise


async def _wait_until_healthy(channel: grpc.aio.Channel) -> None:
    request = health_pb2.HealthCheckRequest(service=_SERVICE)
    watch = health_pb2_grpc.HealthStub(channel).Watch  # type: ignore[attr-defined]  # the stubs lack it
    async for response in watch(request, wait_for_ready=True):
        if response.status == health_pb2.HealthCheckResponse.SERVING:
            return


def _banner(address: str, model: inference_pb2.GetModelResponse) -> str:
    command = "everystop" if shutil.which("everystop") else os.path.relpath(Path(sys.executable).with_name("everystop"))
    local = reachable(address)
    option = "" if local == _DEFAULT_ADDRESS else f" --address {local}"
    ready = f"Everystop is ready on {address}: {model.name} ({model.dtype}, up to {model.max_model_len} tokens)."
    attempt = f'{command} generate "The capital of France is" --max-tokens 16{option}'
    return f"\n{click.style(ready, bold=True)}\n\n  Try:   {attempt}\n  Stop:  Ctrl-C\n"


def _child_environment() -> dict[str, str]:
    """This environment without settings: the children get all of theirs as flags."""
    prefixes = ("EVERYSTOP_SCHEDULER_", "EVERYSTOP_EXECUTOR_")
    return {key: value for key, value in os.environ.items() if key != CONFIG_ENVVAR and not key.startswith(prefixes)}
