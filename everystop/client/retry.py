"""When a client tries again, and how long it waits before. No I/O and no sleeping: each client has its own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from everystop.errors import Reason, ServiceError

_FIRST_BACKOFF_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How far a client goes to bring an answer to its end.

    It tries again when a stream breaks or nobody answers (UNAVAILABLE, or CANCELLED by the other side), and when the
    queue is full (RESOURCE_EXHAUSTED with RetryInfo). Everything else is for the caller to decide.
    """

    max_elapsed_s: float = 60.0
    """Seconds without anything new after which the last error is raised. A scheduler may take 30 to notice that a
    connection is dead, and keeps the id of its request until then."""
    max_backoff_s: float = 2.0
    """The longest pause between two tries, beside what RetryInfo asks for. Pauses are drawn evenly from zero up to a
    bound that begins at 0.1 s and doubles, so that many clients don't come back all at once."""

    def __post_init__(self) -> None:
        for name in ("max_elapsed_s", "max_backoff_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")


DEFAULT_RETRY = Retry()


def closed_error() -> ServiceError:
    """What ends a pause whose client is closed."""
    return ServiceError(grpc.StatusCode.CANCELLED, Reason.CANCELLED, "the client was closed")


class Patience:
    """What is left of it, in one call that may take many tries."""

    def __init__(
        self, retry: Retry | None, timeout_s: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`retry` None never tries again; `timeout_s` bounds the whole, None does not."""
        self._retry = retry
        self._clock = clock
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._outage_start: float | None = None
        self._backoff_s = _FIRST_BACKOFF_S
        self._has_broken = False

    def remaining_s(self) -> float | None:
        """Seconds until the deadline, for the next try to send along; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def renew(self) -> None:
        """Something new has come, so the outage is over."""
        self._outage_start = None
        self._backoff_s = _FIRST_BACKOFF_S

    def pause_s(self, error: ServiceError) -> float:
        """Seconds to wait before the next try. Raises `error` itself when there is no use in one, or no time for it."""
        if self._retry is None or not self._passes(error):
            raise error from None
        now = self._clock()
        if self._outage_start is None:
            self._outage_start = now
        backoff_s = min(self._backoff_s, self._retry.max_backoff_s)
        self._backoff_s = 2 * backoff_s
        left_s = self._outage_start + self._retry.max_elapsed_s - now
        pause_s = min(left_s, random.uniform(0, backoff_s) + (error.retry_after_s or 0.0))
        remaining_s = self.remaining_s()
        if left_s <= 0 or (remaining_s is not None and pause_s >= remaining_s):
            raise error from None  # at the deadline too: it says more than that the time is up
        return pause_s

    def _passes(self, error: ServiceError) -> bool:
        """Whether the same request may well succeed later, and does no harm until then."""
        # A server that dies under a call may cancel it. When it was this client that was closed, the pause says so.
        is_cancelled = error.code is grpc.StatusCode.CANCELLED and error.reason is Reason.TRANSPORT
        if error.code is grpc.StatusCode.UNAVAILABLE or is_cancelled:
            self._has_broken = True
            return True
        if error.reason is Reason.REQUEST_ID_IN_USE:
            # By what is left of an earlier try, as long as its scheduler hasn't noticed that the connection broke.
            return self._has_broken
        return error.code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s is not None
