"""Policies by name. A new one is a file beside `fcfs.py` and a line here."""

from __future__ import annotations

from collections.abc import Callable

from scheduler_svc.core.policies.base import Policy
from scheduler_svc.core.policies.fcfs import FcfsPolicy
from scheduler_svc.core.policies.priority import PriorityPolicy

POLICIES: dict[str, Callable[[], Policy]] = {
    "fcfs": FcfsPolicy,
    "priority": PriorityPolicy,
}

__all__ = ["POLICIES", "FcfsPolicy", "Policy", "PriorityPolicy"]
