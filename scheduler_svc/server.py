"""Starts a scheduler: the gRPC server with everything on it, and the loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from everystop import channel
from everystop.errors import Reason, ServiceError
from everystop.observers import Observers
from everystop.scheduler.v1 import admin_pb2_grpc, inference_pb2_grpc
from everystop.settings import SchedulerConfig
from scheduler_svc.lifecycle import ADMIN_SERVICE, INFERENCE_SERVICE, Lifecycle
from scheduler_svc.loop import Loop
from scheduler_svc.servicer import AdminServicer, InferenceServicer

HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_OTHER_CALLS_GRACE_S = 0.5
"""For calls other than `Generate`, once those are over; who watches the health never ends by itself."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RunningScheduler:
    """A started scheduler."""

    address: str
    loop: Loop
    lifecycle: Lifecycle
    failed: asyncio.Task[None]
    """The loop itself: it ends only if it dies of a bug."""
    observers: Observers
    _server: grpc.aio.Server

    async def stop(self, grace_s: float = 5.0) -> None:
        """End what still runs with UNAVAILABLE, give its clients up to `grace_s` seconds to read that, and stop."""
        desk = self.loop.desk
        desk.is_closing = True
        desk.end_all(ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, "the scheduler is shutting down"))
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await desk.empty.wait()
        await self._server.stop(_OTHER_CALLS_GRACE_S)
        self.failed.cancel()
        await asyncio.wait({self.failed})
        await self.observers.stop()
        if not self.failed.cancelled():
            self.failed.result()  # it had died of a bug


async def start(config: SchedulerConfig) -> RunningScheduler:
    """Listen and begin to look for the executor. Raises OSError when the address can't be had."""
    observers = Observers.start("everystop-scheduler", config)
    loop = Loop(config)
    _watch(loop, observers)
    lifecycle = Lifecycle(loop.desk, config)
    server = channel.server(max_calls=_max_calls(config))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(loop), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(loop, lifecycle), server)
    health_pb2_grpc.add_HealthServicer_to_server(lifecycle.health, server)
    services = (INFERENCE_SERVICE, ADMIN_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(services, server)
    await lifecycle.start()
    address = channel.bind(server, config.listen)
    await server.start()
    channel.write_address_file(config.address_file, address)
    task = asyncio.create_task(loop.run(lifecycle.set_connected), name="loop")
    log.info("scheduler_listening", address=address, executor_address=config.executor_address)
    return RunningScheduler(address, loop, lifecycle, task, observers, server)


def _max_calls(config: SchedulerConfig) -> int:
    """The last resort: far more calls than the desk lets in, so that those who ask for health or status get through."""
    return 8 * (config.max_waiting + config.max_num_seqs) + 1000


def _watch(loop: Loop, observers: Observers) -> None:
    # Imported here: each brings a library that others don't need.
    if observers.metrics is not None:
        from scheduler_svc.metrics import SchedulerCollector

        observers.metrics.show(SchedulerCollector(loop))
    if observers.tracing is not None:
        from scheduler_svc.tracing import RequestTracer

        loop.desk.ledger.tracer = RequestTracer(observers.tracing.tracer)
