"""Starts an executor: the gRPC server with everything on it, and the engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from everystop import channel
from everystop.executor.v1 import executor_pb2, executor_pb2_grpc
from everystop.observers import Observers
from everystop.settings import ExecutorConfig
from executor_svc.backend import Backend
from executor_svc.engine import Engine
from executor_svc.servicer import ExecutorServicer

if TYPE_CHECKING:
    from executor_svc.tracing import AttemptTracer

EXECUTOR_SERVICE = executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name

_GRACE_S = 0.5
"""How long calls may take to hear that the executor is shutting down."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunningExecutor:
    """A started executor."""

    address: str
    observers: Observers
    _server: grpc.aio.Server
    _engine: Engine
    _step_timeout_s: float

    async def wait_broken(self) -> None:
        """Return when the backend can't go on; the process should end then."""
        await self._engine.broken.wait()

    async def wait_hung(self) -> None:
        """Return when a step takes longer than it may; the process should end then, and not wait for anything."""
        await self._engine.wait_hung(self._step_timeout_s)

    async def stop(self) -> None:
        """Take no more calls, end the open session with UNAVAILABLE, and close the backend."""
        await asyncio.gather(self._server.stop(_GRACE_S), self._engine.stop())
        await self.observers.stop()


async def start(config: ExecutorConfig, backend: Backend) -> RunningExecutor:
    """Serve a backend that is loaded. It is ready when it listens. Raises OSError when the address can't be had."""
    observers = Observers.start("everystop-executor", config)
    server = channel.server(max_request_bytes=channel.MAX_STEP_BYTES)
    address = channel.bind(server, config.listen)
    engine = Engine(backend, _attempt_tracer(observers))
    if observers.metrics is not None:
        from executor_svc.metrics import ExecutorCollector  # brings a library that others don't need

        observers.metrics.show(ExecutorCollector(engine, backend.info))
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(ExecutorServicer(engine, backend), server)
    health = health_aio.HealthServicer()  # "" is SERVING by itself
    await health.set(EXECUTOR_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    await server.start()
    channel.write_address_file(config.address_file, address)
    _log.info("executor_listening", address=address, backend=backend.info.name, model=backend.info.model.name)
    return RunningExecutor(address, observers, server, engine, config.step_timeout_s)


def _attempt_tracer(observers: Observers) -> AttemptTracer | None:
    if observers.tracing is None:
        return None
    from executor_svc.tracing import AttemptTracer  # brings a library that others don't need

    return AttemptTracer(observers.tracing.tracer)
