"""When health says what: in virtual time, so to the moment."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from grpc_health.v1 import health_pb2
from virtual_time import VirtualLoop, turns

from everystop.settings import SchedulerConfig
from scheduler_svc.desk import RequestDesk
from scheduler_svc.lifecycle import ADMIN_SERVICE, INFERENCE_SERVICE, Lifecycle

CONFIG = SchedulerConfig(unready_after_s=3.0, drain_grace_s=10.0)


class Watched:
    """A lifecycle, and the time."""

    def __init__(self, event_loop: VirtualLoop) -> None:
        self._event_loop = event_loop
        self.desk = RequestDesk(CONFIG, lambda: None, event_loop.time)
        self.lifecycle = Lifecycle(self.desk, CONFIG)
        event_loop.run_until_complete(self.lifecycle.start())

    def wait(self, seconds: float) -> None:
        self._event_loop.run_until_complete(asyncio.sleep(seconds))
        self._event_loop.run_until_complete(turns(3))

    def connect(self, connected: bool) -> None:
        self._event_loop.call_soon(self.lifecycle.set_connected, connected)
        self.wait(0)

    def drain(self, grace_s: float | None = None) -> None:
        self._event_loop.call_soon(self.lifecycle.drain, grace_s)
        self.wait(0)

    def is_serving(self, service: str = INFERENCE_SERVICE) -> bool:
        check = self.lifecycle.health.Check(health_pb2.HealthCheckRequest(service=service), None)
        return bool(self._event_loop.run_until_complete(check).status == health_pb2.HealthCheckResponse.SERVING)


@pytest.fixture
def watched() -> Iterator[Watched]:
    event_loop = VirtualLoop()
    yield Watched(event_loop)
    for task in asyncio.all_tasks(event_loop):
        task.cancel()
    event_loop.run_until_complete(turns(3))
    event_loop.close()


def test_it_lives_before_it_serves(watched: Watched) -> None:
    assert watched.is_serving("")
    assert watched.is_serving(ADMIN_SERVICE)
    assert not watched.is_serving()
    watched.connect(True)
    assert watched.is_serving()


def test_tries_that_fail_do_not_put_off_the_moment(watched: Watched) -> None:
    watched.connect(True)
    for _ in range(3):
        watched.connect(False)
        watched.wait(0.9)
    assert watched.is_serving()
    watched.wait(0.4)
    assert not watched.is_serving()
    assert watched.is_serving("")


def test_a_short_loss_is_not_told(watched: Watched) -> None:
    watched.connect(True)
    watched.connect(False)
    watched.wait(2.9)
    watched.connect(True)
    watched.wait(5.0)
    assert watched.is_serving()


def test_a_drain_is_told_at_once_and_a_new_executor_changes_nothing(watched: Watched) -> None:
    watched.connect(True)
    watched.drain()
    assert not watched.is_serving()
    watched.connect(False)
    watched.connect(True)
    assert not watched.is_serving()
    assert watched.is_serving(ADMIN_SERVICE)


def test_a_drain_without_requests_is_over_at_once(watched: Watched) -> None:
    watched.drain()
    assert watched.lifecycle.drained.is_set()


def test_a_drain_lasts_as_long_as_its_grace(watched: Watched) -> None:
    watched.desk.empty.clear()
    watched.drain()
    watched.wait(9.9)
    assert not watched.lifecycle.drained.is_set()
    watched.wait(0.2)
    assert watched.lifecycle.drained.is_set()


def test_a_second_drain_only_shortens_the_first(watched: Watched) -> None:
    watched.desk.empty.clear()
    watched.drain(5.0)
    watched.drain(100.0)
    watched.wait(5.1)
    assert watched.lifecycle.drained.is_set()
