"""Ready, draining, over: what load balancers, operators and the process itself need to know."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from everystop.errors import Reason, ServiceError
from everystop.scheduler.v1 import admin_pb2, inference_pb2
from everystop.settings import SchedulerConfig
from scheduler_svc.desk import RequestDesk

INFERENCE_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

log = structlog.get_logger()


class Lifecycle:
    """Health in grpc.health.v1, and the drain.

    "" and AdminService are SERVING while the process lives. InferenceService is SERVING while requests are answered: it
    turns NOT_SERVING at once when the scheduler drains, and `unready_after_s` after the executor was lost.
    """

    def __init__(self, desk: RequestDesk, config: SchedulerConfig) -> None:
        self.health = health_aio.HealthServicer()
        self.drained = asyncio.Event()
        """Set when a drain is over and the process should end."""
        self._desk = desk
        self._config = config
        self._connected = False
        self._becoming_unready: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Alive, not ready."""
        for service in ("", ADMIN_SERVICE):
            await self.health.set(service, _SERVING)
        await self.health.set(INFERENCE_SERVICE, _NOT_SERVING)

    def set_connected(self, connected: bool) -> None:
        """There is an executor, or there is none any more."""
        if connected == self._connected:
            return  # one more try that failed: what counts is the time since the loss
        self._connected = connected
        if self._becoming_unready is not None:
            self._becoming_unready.cancel()
            self._becoming_unready = None
        if connected:
            self._publish()
        else:
            loop = asyncio.get_running_loop()
            self._becoming_unready = loop.call_later(self._config.unready_after_s, self._publish)

    def drain(self, grace_s: float | None = None) -> int:
        """Refuse new requests and set `drained` once the clients have all answers, or the grace period is over.

        Returns how many are in. A second drain can only shorten the first.
        """
        grace_s = self._config.drain_grace_s if grace_s is None else grace_s
        log.info("draining", num_requests=self._desk.num_requests, grace_s=grace_s)
        self._desk.is_closing = True
        self._publish()
        self._spawn(self._drain(grace_s))
        return self._desk.num_requests

    async def _drain(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await self._desk.empty.wait()
        except TimeoutError:
            log.warning("drain_cut_short", num_requests=self._desk.num_requests, num_unread=self._desk.num_unread)
            message = f"the scheduler is draining, and the grace period of {grace_s:g} s is over"
            self._desk.end_all(ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, message))
        self.drained.set()

    def _publish(self) -> None:
        """Say whether requests are answered."""
        status = _SERVING if self._connected and not self._desk.is_closing else _NOT_SERVING
        self._spawn(self.health.set(INFERENCE_SERVICE, status))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)
