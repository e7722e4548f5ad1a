"""How many threads compute, and what is set for them before torch is there."""

from __future__ import annotations

import os

import pytest

from executor_svc.model import threads


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        # Set first, so that whatever the test leaves there is undone.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(threads, "_control_group_cores", lambda: None)


def test_zero_is_one_thread_on_each_core() -> None:
    assert threads.num_threads(0) == 12
    assert threads.num_threads(5) == 5


@pytest.mark.parametrize(("quota", "expected"), [(4.0, 4), (2.5, 2), (0.5, 1), (64.0, 12)])
def test_a_containers_quota_counts(monkeypatch: pytest.MonkeyPatch, quota: float, expected: int) -> None:
    monkeypatch.setattr(threads, "_control_group_cores", lambda: quota)
    assert threads.num_threads(0) == expected


def test_openmp_is_set_up() -> None:
    threads.configure_environment(3)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert int(os.environ["GOMP_SPINCOUNT"]) > 0


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    threads.configure_environment(3)
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "GOMP_SPINCOUNT" not in os.environ
