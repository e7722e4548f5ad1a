"""Starts a scheduler: the gRPC server with everything on it, and the loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from everystop import channel
from everystop.scheduler.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from everystop.settings import SchedulerConfig
from scheduler_svc.loop import Loop
from scheduler_svc.servicer import AdminServicer, InferenceServicer

INFERENCE_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

log = structlog.get_logger()


class Health:
    """grpc.health.v1: "" and AdminService say that the process lives, InferenceService that it can serve."""

    def __init__(self) -> None:
        self.servicer = health_aio.HealthServicer()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Alive, not ready."""
        for service in ("", ADMIN_SERVICE):
            await self.servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
        await self.servicer.set(INFERENCE_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)

    def set_ready(self, ready: bool) -> None:
        """Ready or not, from a callback."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if ready else statuses.NOT_SERVING
        task = asyncio.get_running_loop().create_task(self.servicer.set(INFERENCE_SERVICE, status))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


@dataclass(slots=True)
class RunningScheduler:
    """A started scheduler. `failed` completes only if its loop dies of a bug."""

    address: str
    loop: Loop
    failed: asyncio.Task[None]
    _server: grpc.aio.Server

    async def stop(self, grace_s: float = 0.5) -> None:
        """Refuse new work, give calls `grace_s` seconds to end, then stop."""
        self.loop.draining = True
        await self._server.stop(grace_s)
        self.failed.cancel()
        with suppress(asyncio.CancelledError):
            await self.failed


async def start(config: SchedulerConfig) -> RunningScheduler:
    """Listen and begin to look for the executor. Raises OSError when the address can't be had."""
    loop, health = Loop(config), Health()
    server = channel.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(loop), server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(loop), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    services = (INFERENCE_SERVICE, ADMIN_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(services, server)
    await health.start()
    address = channel.bind(server, config.listen)
    await server.start()
    channel.write_address_file(config.address_file, address)
    task = asyncio.create_task(loop.run(health.set_ready), name="loop")
    log.info("scheduler_listening", address=address, executor_address=config.executor_address)
    return RunningScheduler(address, loop, task, server)
