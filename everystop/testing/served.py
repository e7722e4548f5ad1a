"""A scheduler and a mock executor inside this process, on real ports, for the time of a `with` block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

import executor_svc.server
import scheduler_svc.lifecycle
import scheduler_svc.server
from everystop import channel, log
from everystop.settings import ExecutorConfig, SchedulerConfig
from everystop.testing.mock_settings import mock_settings
from executor_svc.mock import MockBackend

_TIMEOUT_S = 30.0
"""For anything that is asked of the services; each takes well under a second."""

_Result = TypeVar("_Result")


@contextmanager
def serve_mock(**settings: Any) -> Iterator[MockService]:
    """Run both services until the block ends; they are ready when it begins.

    Settings are those of `everystop scheduler` and `everystop executor` by name, such as `max_num_seqs=4` or
    `mock_eos_rate=0.1`. Log lines from "warning" on go to stderr, unless structlog is configured already.
    NOTE: `mock_fail="die@…"` ends the process that calls this.

    Raises:
        TypeError: a setting that neither service has.
        ConfigError: a value that is out of its range.

    """
    scheduler_config, executor_config = mock_settings(settings)
    if not structlog.is_configured():
        log.configure("auto", "warning")
    with _loop_thread() as loop:
        service = MockService(scheduler_config, executor_config, loop)
        try:
            service._run(service._start())
            yield service
        finally:
            service._run(service._stop())


class MockService:
    """Two running services. Made by `serve_mock`."""

    def __init__(
        self, scheduler_config: SchedulerConfig, executor_config: ExecutorConfig, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.address = ""
        """The scheduler's "host:port", for clients."""
        self.executor_address = ""
        """The executor's "host:port"."""
        self._scheduler_config = scheduler_config
        self._executor_config = executor_config
        self._loop = loop
        self._scheduler: scheduler_svc.server.RunningScheduler | None = None
        self._executor: executor_svc.server.RunningExecutor | None = None

    @property
    def metrics_address(self) -> str:
        """Where the scheduler's metrics are, with the setting `metrics_listen="127.0.0.1:0"`."""
        assert self._scheduler is not None
        return self._scheduler.observers.metrics_address

    @property
    def executor_metrics_address(self) -> str:
        """Where the executor's metrics are."""
        assert self._executor is not None, "there is no executor"
        return self._executor.observers.metrics_address

    def stop_executor(self) -> None:
        """Take the executor away. Answers pause until there is one again."""
        self._run(self._stop_executor())

    def start_executor(self) -> None:
        """Bring a new executor, without any memory of the last one, to the same address."""
        self._run(self._start_executor())

    async def _start(self) -> None:
        await self._start_executor()
        config = replace(self._scheduler_config, executor_address=self.executor_address)
        self._scheduler = await scheduler_svc.server.start(config)
        self.address = self._scheduler.address
        await _until_serving(self.address)

    async def _stop(self) -> None:
        if self._scheduler is not None:
            await self._scheduler.stop()
            self._scheduler = None
        await self._stop_executor()

    async def _start_executor(self) -> None:
        assert self._executor is None, "there is an executor already"
        config = self._executor_config
        if self.executor_address:
            config = replace(config, listen=self.executor_address)
        self._executor = await executor_svc.server.start(config, MockBackend(config))
        self.executor_address = self._executor.address

    async def _stop_executor(self) -> None:
        if self._executor is not None:
            await self._executor.stop()
            self._executor = None

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_TIMEOUT_S)


@contextmanager
def _loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs in a thread of its own."""
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        thread = threading.Thread(target=loop.run_forever, name="everystop-mock", daemon=True)
        thread.start()
        try:
            yield loop
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


async def _until_serving(address: str) -> None:
    """Return once the scheduler at `address` has its executor."""
    service = scheduler_svc.lifecycle.INFERENCE_SERVICE
    async with channel.client_channel(address) as grpc_channel:
        watch = health_pb2_grpc.HealthStub(grpc_channel).Watch  # type: ignore[attr-defined]  # the stubs lack it
        async for response in watch(health_pb2.HealthCheckRequest(service=service)):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return
