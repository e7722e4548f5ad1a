"""The imperative shell around the core: receive, apply, schedule, send; one connection to an executor after another.

Everything in the scheduler runs on one event loop, as tasks that only meet in memory:

    Loop.run            results in, plans out
    RequestDesk.run     turns what the steps brought into deltas, a few streams a turn, so that the loop is never held
    servicer calls      submit a request at the desk, read its stream, release it
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

import grpc
import structlog

from everystop import channel
from everystop.backoff import Backoff
from everystop.errors import Reason, ServiceError
from everystop.plan import ExecutorInfo, Hello
from everystop.settings import SchedulerConfig
from scheduler_svc import executor_link
from scheduler_svc.core import CoreConfig, ResultMismatchError, Scheduler
from scheduler_svc.desk import RequestDesk
from scheduler_svc.executor_link import ExecutorLink, LinkLostError
from scheduler_svc.frontend.tokenizer import Tokenizer
from scheduler_svc.stats import StepStats
from scheduler_svc.validation import ServedModel

MAX_STEPS_IN_FLIGHT = 2
"""One that the executor runs and one that it holds, so that it never waits for the scheduler."""

HANDSHAKE_TIMEOUT_S = 10.0

_IN_GOOD_ORDER = {Reason.DRAINING, Reason.SUPERSEDED}
"""Endings of a connection that no request can be the cause of."""

_MAX_LOGGED_REQUESTS = 32
"""Most request ids in one log line."""

log = structlog.get_logger()


class Loop:
    """Owns the core and the connection to the executor."""

    def __init__(self, config: SchedulerConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.stats = StepStats()
        self.model: ServedModel | None = None
        """What is served; known from the first handshake on."""
        self.core: Scheduler | None = None
        self.link: ExecutorLink | None = None
        self.state_reason = f"no executor at {config.executor_address} has answered yet"
        self._clock = clock
        self._changed = asyncio.Event()
        self.desk = RequestDesk(config, self._changed.set, clock)
        self._had_work = False
        self._was_lost = False

    # -- the connection --------------------------------------------------------------------------------------------

    async def run(self, on_state: Callable[[bool], None]) -> None:
        """Connect, iterate until the connection is lost, connect again, for ever. `on_state` hears of ready or not."""
        try:
            await self._run(on_state)
        except Exception:  # a bug; the process ends, and this is what it takes along
            log.exception("scheduler_crashed", **self._held(self.desk.request_ids))
            raise

    async def _run(self, on_state: Callable[[bool], None]) -> None:
        async with channel.client_channel(self.config.executor_address) as grpc_channel, asyncio.TaskGroup() as tasks:
            tasks.create_task(self.desk.run(), name="delivery")
            backoff = Backoff()  # while nobody listens at all, the channel itself backs off
            while True:
                num_steps_before = self.stats.num_steps
                is_superseded = False
                try:
                    async with self._connect(grpc_channel) as link:
                        on_state(True)
                        await self._iterate(link)
                except LinkLostError as error:
                    self._note_loss(error)
                    is_superseded = error.cause.reason is Reason.SUPERSEDED
                finally:
                    self.link = None
                    on_state(False)
                # Two schedulers of one executor must not throw each other out at every step.
                was_useful = self.stats.num_steps > num_steps_before and not is_superseded
                await asyncio.sleep(backoff.next_delay_s(was_useful=was_useful))

    @asynccontextmanager
    async def _connect(self, grpc_channel: grpc.aio.Channel) -> AsyncIterator[ExecutorLink]:
        """Wait until somebody listens, shake hands and take the executor in. Raises LinkLostError."""
        hello = Hello(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        await grpc_channel.channel_ready()
        connection = executor_link.connect(grpc_channel, hello, self._changed.set, timeout_s=HANDSHAKE_TIMEOUT_S)
        async with connection as link:
            await self._adopt(link.executor, grpc_channel)
            self.link, self.state_reason = link, "an executor is connected"
            yield link

    def _note_loss(self, error: LinkLostError) -> None:
        self.state_reason = f"the executor is lost: {error}"
        if self.link is None:  # it was never taken in, and nothing was lost
            log.warning("executor_not_usable", reason=str(error), num_requests=self.desk.num_requests)
            return
        self._was_lost = error.cause.reason not in _IN_GOOD_ORDER
        in_flight = self.core.in_flight if self.core is not None else {}
        took_part = dict.fromkeys(request_id for ids in in_flight.values() for request_id in ids)
        log.warning("executor_lost", reason=str(error), epoch=f"{self.link.executor.epoch:x}", **self._held(took_part))

    def _held(self, request_ids: Iterable[str]) -> dict[str, Any]:
        """For the log line of a death: what was in, and the first of `request_ids`."""
        core = self.core
        return {
            "num_requests": self.desk.num_requests,
            "num_running": core.num_running if core is not None else 0,
            "num_waiting": core.num_waiting if core is not None else 0,
            "step_ids": list(core.in_flight) if core is not None else [],
            "request_ids": list(islice(request_ids, _MAX_LOGGED_REQUESTS)),
        }

    async def _adopt(self, executor: ExecutorInfo, grpc_channel: grpc.aio.Channel) -> None:
        """Take a new executor in: the first one founds the core, a later one must serve the same model."""
        if self.core is None or self.model is None:
            files = await executor_link.fetch_tokenizer(grpc_channel, timeout_s=HANDSHAKE_TIMEOUT_S)
            try:
                tokenizer = await asyncio.to_thread(Tokenizer.from_files, files)
            except ServiceError as error:
                raise LinkLostError(error) from error
            self.core = self._found_core(executor)
        else:
            _check_same(self.model.executor, executor)
            self.desk.deliver(self.core.reset(executor.epoch, executor.num_blocks, is_loss=self._was_lost))
            tokenizer = self.model.tokenizer
        self.model = ServedModel(executor, tokenizer, self.core.config.max_num_tokens)
        self.desk.open(self.model, self.core)
        self._had_work = False
        self.stats.num_connections += 1
        log.info(
            "executor_connected",
            epoch=f"{executor.epoch:x}",
            model=executor.model.name,
            backend=executor.backend,
            dtype=executor.dtype,
            num_blocks=executor.num_blocks,
            block_size=executor.block_size,
            max_model_len=self.model.max_model_len,
        )

    def _found_core(self, executor: ExecutorInfo) -> Scheduler:
        config = self.config
        core_config = CoreConfig(
            block_size=executor.block_size,
            num_blocks=executor.num_blocks,
            vocab_size=executor.model.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=min(executor.max_model_len, config.max_model_len or executor.max_model_len),
            max_prefill_chunk=config.max_prefill_chunk,
            watermark=config.watermark,
            max_losses=config.max_losses,
        )
        return Scheduler(core_config, epoch=executor.epoch, policy=config.policy, batching=config.batching)

    # -- one iteration after another -------------------------------------------------------------------------------

    async def _iterate(self, link: ExecutorLink) -> None:
        assert self.core is not None
        self._changed.set()
        try:
            async with asyncio.timeout(None) as step_limit:
                while True:
                    await self._changed.wait()
                    self._changed.clear()
                    self._apply_results(link, self.core, step_limit)
                    await self._send_plans(link, self.core, step_limit)
        except TimeoutError:
            message = f"a step took longer than {self.config.step_timeout_s:g} s"
            raise LinkLostError(ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, Reason.STEP_TIMEOUT, message)) from None

    def _apply_results(self, link: ExecutorLink, core: Scheduler, step_limit: asyncio.Timeout) -> None:
        while link.results:
            result = link.results.popleft()
            try:
                outputs = core.apply(result, self._clock())
            except ResultMismatchError as error:
                message = f"the executor answered garbage: {error}"
                raise LinkLostError(ServiceError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, message)) from error
            self._restart(step_limit, core)
            self.stats.received(result.timings, had_work=self._had_work)
            self._had_work = core.num_running + core.num_waiting > 0
            self.desk.deliver(outputs)
        if link.lost is not None:
            raise LinkLostError(link.lost)

    async def _send_plans(self, link: ExecutorLink, core: Scheduler, step_limit: asyncio.Timeout) -> None:
        while core.num_in_flight_steps < MAX_STEPS_IN_FLIGHT:
            plan = core.schedule(self._clock())
            if plan is None:
                return
            if core.num_in_flight_steps == 1:
                self._restart(step_limit, core)
            self.stats.sent(num_bytes=await link.send(plan), num_tokens=plan.num_tokens)

    def _restart(self, step_limit: asyncio.Timeout, core: Scheduler) -> None:
        """A step begins when it is sent to an idle executor, or when the one before it has ended."""
        now = asyncio.get_running_loop().time()
        step_limit.reschedule(now + self.config.step_timeout_s if core.num_in_flight_steps else None)

    # -- for everybody else ----------------------------------------------------------------------------------------

    def serving(self) -> ServedModel:
        """The model. Raises ServiceError UNAVAILABLE before the first handshake and while draining."""
        self.desk.check_open()
        if self.model is None:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.NO_EXECUTOR, self.state_reason, retry_after_s=1.0)
        return self.model


def _check_same(known: ExecutorInfo, executor: ExecutorInfo) -> None:
    """A returning executor must serve what the running requests began with. Raises LinkLostError."""
    for name, ours, theirs in (
        ("model", known.model, executor.model),
        ("block_size", known.block_size, executor.block_size),
        ("dtype", known.dtype, executor.dtype),
        ("max_model_len", known.max_model_len, executor.max_model_len),
    ):
        if ours != theirs:
            message = f"the executor came back with another {name}: {theirs}, was {ours}"
            raise LinkLostError(ServiceError(grpc.StatusCode.FAILED_PRECONDITION, Reason.MODEL_CHANGED, message))
