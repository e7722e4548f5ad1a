"""Runs plans: one dedicated thread owns the backend and the seats; sessions bring plans to it and results back.

    event loop                                             forward thread
    Session.submit ──────── queue of orders ─────────────> seats.apply, backend.execute, seats.commit
    Session.next_result <── call_soon_threadsafe ──────── result, or why the session ended

One session is served at a time; a newer one supersedes it. Each starts with empty seats and a new epoch.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVarTuple

import grpc
import structlog

from everystop.errors import Reason, ServiceError
from everystop.plan import ExecutorInfo, Hello, StepPlan, StepResult, StepTimings
from executor_svc.backend import Backend, BackendInfo
from executor_svc.plan_checks import Limits
from executor_svc.seats import Seats
from executor_svc.stats import EngineStats
from executor_svc.watchdog import Watchdog

if TYPE_CHECKING:
    from executor_svc.tracing import AttemptTracer

MAX_PLANS_IN_FLIGHT = 8
"""Plans without a result yet; a scheduler that keeps the executor busy has two."""

_STOP_TIMEOUT_S = 3.0
"""How long a step may hold up a stop."""

_MAX_LOGGED_REQUESTS = 32
"""Most request ids in one log line."""

IDLE_S = 0.25
"""Without a plan for so long, the spans of attempts end: their exits may come hours later, with the next plan."""

_Args = TypeVarTuple("_Args")

_log = structlog.get_logger(__name__)


class Session:
    """One scheduler's connection. Belongs to the event loop, but for `ended`, which the forward thread reads."""

    def __init__(self, executor: ExecutorInfo, limits: Limits, submit: Callable[[Session, StepPlan], None]) -> None:
        self.executor = executor
        self.limits = limits
        self.ended = False
        self._submit = submit
        self._loop = asyncio.get_running_loop()
        self._outcomes: asyncio.Queue[StepResult | ServiceError | None] = asyncio.Queue()
        self._num_in_flight = 0

    def submit(self, plan: StepPlan) -> None:
        """Queue a plan. Raises ServiceError FAILED_PRECONDITION when too many have no result yet."""
        if self._num_in_flight == MAX_PLANS_IN_FLIGHT:
            message = (
                f"step {plan.step_id} came while {MAX_PLANS_IN_FLIGHT} plans, the most that may wait, have no result"
            )
            raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, Reason.INVALID_PLAN, message)
        self._num_in_flight += 1
        self._submit(self, plan)

    async def next_result(self) -> StepResult | None:
        """The next step's result; None when the session was ended without an error. Raises the error it ended with."""
        outcome = await self._outcomes.get()
        if isinstance(outcome, ServiceError):
            raise outcome
        return outcome

    def end(self, error: ServiceError | None) -> None:
        """End the session; only the first call counts. Plans that have not started are dropped."""
        if not self.ended:
            self.ended = True
            self._outcomes.put_nowait(error)

    def end_from_thread(self, error: ServiceError) -> None:
        """As `end`, from the forward thread."""
        _call_soon(self._loop, self.end, error)

    def deliver_from_thread(self, result: StepResult) -> None:
        """Hand over a result, from the forward thread."""
        _call_soon(self._loop, self._deliver, result)

    def _deliver(self, result: StepResult) -> None:
        self._num_in_flight -= 1
        if not self.ended:
            self._outcomes.put_nowait(result)


class Engine:
    """The forward thread and who it works for. Methods without an underscore belong to the event loop."""

    def __init__(self, backend: Backend, tracer: AttemptTracer | None = None) -> None:
        """`tracer` traces requests that the scheduler traces."""
        self.broken = asyncio.Event()
        """Set when the backend can't go on; the process should end then."""
        self.stats = EngineStats()
        self._watchdog = Watchdog()
        self._tracer = tracer
        self._loop = asyncio.get_running_loop()
        self._backend = backend
        self._info: BackendInfo = backend.info
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._newest: Session | None = None
        # The forward thread's own: whom it works for, and since when it has nothing to do.
        self._served: Session | None = None
        self._seats: Seats | None = None
        self._idle_since = time.monotonic()
        # A daemon: a step that never ends must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="forward", daemon=True)
        self._thread.start()

    @property
    def num_seqs(self) -> int:
        """Sequences that are seated; may be asked from any thread."""
        seats = self._seats
        return 0 if seats is None else seats.num_seqs

    def open(self, hello: Hello) -> Session:
        """Begin a session; one that is open gets ABORTED. Raises ServiceError when `hello` asks for too much."""
        _check_limit("max_num_seqs", hello.max_num_seqs, self._info.max_num_seqs)
        _check_limit("max_num_batched_tokens", hello.max_num_batched_tokens, self._info.max_num_batched_tokens)
        if self.broken.is_set():
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.NO_EXECUTOR, "the executor's backend is broken")
        session = Session(_executor_info(self._info), Limits.of(self._info, hello), self._submit)
        if self._newest is not None:
            message = "a newer scheduler has connected to this executor"
            self._newest.end(ServiceError(grpc.StatusCode.ABORTED, Reason.SUPERSEDED, message))
        self._newest = session
        self._orders.put(partial(self._serve, session))
        return session

    def close(self, session: Session) -> None:
        """Forget a session and all its sequences."""
        session.end(None)
        if self._newest is session:
            self._newest = None
        self._orders.put(partial(self._leave, session))

    async def stop(self) -> None:
        """End the open session and the thread, and close the backend. Gives up on a step that does not end."""
        if self._newest is not None:
            message = "the executor is shutting down"
            self._newest.end(ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, message))
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join, _STOP_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("step_abandoned", timeout_s=_STOP_TIMEOUT_S)

    async def wait_hung(self, limit_s: float) -> None:
        """Return when a step takes longer than `limit_s`; the process should end then, because nothing stops a step."""
        step = await self._watchdog.wait_hung(limit_s)
        _log.error("step_hung", step_id=step.step_id, limit_s=limit_s, **self._held())

    def _submit(self, session: Session, plan: StepPlan) -> None:
        self._orders.put(partial(self._step, session, plan))

    def _run(self) -> None:
        try:
            while (order := self._next_order()) is not None:
                order()
            if self._served is not None:
                self._leave(self._served)
            self._backend.close()
        except Exception:  # noqa: BLE001  # whatever a backend raises, the process must hear of it
            _log.exception("backend_broken", **self._held())
            _call_soon(self._loop, self._give_up)

    def _next_order(self) -> Callable[[], None] | None:
        if self._tracer is not None and self._tracer.has_open_spans:
            try:
                return self._orders.get(timeout=IDLE_S)
            except queue.Empty:
                self._tracer.end_all()
        return self._orders.get()

    def _held(self) -> dict[str, Any]:
        """For a log line: who is seated, and up to which step."""
        if self._seats is None:
            return {"num_seqs": 0}
        request_ids = self._seats.request_ids()
        return {
            "last_step_id": self._seats.last_step_id,
            "num_seqs": len(request_ids),
            "request_ids": request_ids[:_MAX_LOGGED_REQUESTS],
        }

    def _give_up(self) -> None:
        self.broken.set()
        if self._newest is not None:
            message = "the executor's backend is broken"
            self._newest.end(ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.NO_EXECUTOR, message))

    def _serve(self, session: Session) -> None:
        self._backend.reset()
        self._served = session
        self._seats = Seats(session.limits, session.executor.epoch)
        self._idle_since = time.monotonic()
        self.stats.num_sessions += 1
        _log.info("session_opened", epoch=f"{session.executor.epoch:x}", max_num_seqs=session.limits.max_num_seqs)

    def _leave(self, session: Session) -> None:
        if session is self._served:
            _log.info("session_closed", epoch=f"{session.executor.epoch:x}", **self._held())
            self._served = self._seats = None
            self._backend.reset()
            if self._tracer is not None:
                self._tracer.end_all()

    def _step(self, session: Session, plan: StepPlan) -> None:
        if session is not self._served or session.ended:
            return
        assert self._seats is not None
        waited_us = _us_since(self._idle_since)
        started_ns = time.time_ns()
        self._watchdog.began(plan.step_id)
        try:
            result = run_step(self._seats, self._backend, plan, waited_us)
        except ServiceError as error:
            self.stats.refusals[error.reason] += 1
            _log.warning("plan_refused", step_id=plan.step_id, reason=error.reason, message=error.message)
            session.end_from_thread(error)
            self._leave(session)
        except Exception as error:  # noqa: BLE001  # whatever a backend raises ends the session alone
            # Its state is unknown now, so it starts afresh; a backend whose reset fails too is broken.
            self.stats.num_failed_steps += 1
            _log.exception("step_failed", step_id=plan.step_id, **self._held())
            message = f"step {plan.step_id} failed: {type(error).__name__}: {error}"
            session.end_from_thread(ServiceError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, message))
            self._leave(session)
        else:
            self.stats.stepped(plan.num_tokens, result.timings)
            session.deliver_from_thread(result)
            if self._tracer is not None:
                self._tracer.stepped(plan, started_ns)
            _log.debug("step", step_id=plan.step_id, num_seqs=plan.num_seqs, num_tokens=plan.num_tokens)
        self._watchdog.ended()
        self._idle_since = time.monotonic()


def run_step(seats: Seats, backend: Backend, plan: StepPlan, waited_us: int = 0) -> StepResult:
    """One step from plan to result. Raises ServiceError when the seats refuse the plan, or what the backend raises."""
    batch = seats.apply(plan)
    output = backend.execute(batch)
    seats.commit(batch, output)
    return StepResult(
        step_id=plan.step_id,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        failures=output.failures,
        timings=StepTimings(waited_us, output.forward_us, output.sample_us),
    )


def _executor_info(info: BackendInfo) -> ExecutorInfo:
    return ExecutorInfo(
        epoch=secrets.randbits(63),
        model=info.model,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        backend=info.name,
        device=info.device,
        dtype=info.dtype,
    )


def _check_limit(field: str, value: int, limit: int) -> None:
    if value < 1:
        raise ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD, f"{field}: 0, not 1 to {limit}", field=field
        )
    if value > limit:
        message = f"{field}: {value}, but the executor was started with {limit}"
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            Reason.EXECUTOR_LIMIT,
            message,
            field=field,
            metadata={"limit": str(limit)},
        )


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[*_Args], object], *args: *_Args) -> None:
    # A step that was abandoned at a stop may end when the loop is closed and nobody is left to hear of it.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *args)


def _us_since(start: float) -> int:
    return int((time.monotonic() - start) * 1e6)
