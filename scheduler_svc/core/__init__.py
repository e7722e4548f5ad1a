"""The scheduler's core: decides every step, touches nothing outside.

No clock, randomness, I/O or logging: time comes in as `now`, results come in as values, plans and outputs go out.
"""

from __future__ import annotations

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.errors import CoreError, DuplicateRequestError, RequestTooLargeError, ResultMismatchError
from scheduler_svc.core.request import Finish, FinishReason, Output, Request, RequestStats
from scheduler_svc.core.roster import Counters
from scheduler_svc.core.scheduler import Scheduler

__all__ = [
    "CoreConfig",
    "CoreError",
    "Counters",
    "DuplicateRequestError",
    "Finish",
    "FinishReason",
    "Output",
    "Request",
    "RequestStats",
    "RequestTooLargeError",
    "ResultMismatchError",
    "Scheduler",
]
