"""The imperative shell around the core: receive, apply, schedule, send.

Everything here runs on one event loop, as three kinds of tasks that only meet in memory:

    Loop.run          one connection to an executor after another; in each, results in and plans out
    DeliveryPump.run  turns what the steps brought into deltas, a few streams a turn, so that the loop is never held
    servicer calls    `submit` a request, read its stream, `release` it
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

import grpc
import structlog

from everystop import channel
from everystop.errors import Reason, ServiceError
from everystop.plan import ExecutorInfo, Hello
from everystop.settings import SchedulerConfig
from scheduler_svc import executor_link
from scheduler_svc.core import CoreConfig, DuplicateRequestError, RequestTooLargeError, ResultMismatchError, Scheduler
from scheduler_svc.core.request import Output, RequestStats
from scheduler_svc.delivery import DeliveryPump
from scheduler_svc.executor_link import ExecutorLink, LinkLostError
from scheduler_svc.frontend.answer import AnswerText
from scheduler_svc.frontend.tokenizer import Tokenizer
from scheduler_svc.stats import StepStats
from scheduler_svc.stream import RequestStream, timings
from scheduler_svc.validation import Generation, ServedModel

MAX_STEPS_IN_FLIGHT = 2
"""One that the executor runs and one that it holds, so that it never waits for the scheduler."""

HANDSHAKE_TIMEOUT_S = 10.0
RECONNECT_DELAY_S = (0.05, 0.25)
REFUSED_DELAY_S = (0.5, 1.5)
"""Before the next try, drawn evenly: after a connection that worked, and after a handshake that didn't.
While nobody listens at all, the channel itself backs off."""

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
        self.draining = False
        self.state_reason = "waiting for the first executor"
        self._clock = clock
        self._changed = asyncio.Event()
        self._streams: dict[str, RequestStream] = {}
        self._pump = DeliveryPump(self._digest)
        self._had_work = False
        self.num_requests = 0
        self.outcomes: Counter[str] = Counter()
        """Ended requests by the reason in their log line."""

    # -- the connection --------------------------------------------------------------------------------------------

    async def run(self, on_state: Callable[[bool], None]) -> None:
        """Connect, iterate until the connection is lost, connect again, for ever. `on_state` hears of ready or not."""
        hello = Hello(self.config.max_num_seqs, self.config.max_num_batched_tokens)
        async with channel.client_channel(self.config.executor_address) as grpc_channel, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pump.run(), name="delivery-pump")
            while True:
                delay_s = REFUSED_DELAY_S
                try:
                    await grpc_channel.channel_ready()
                    async with executor_link.connect(
                        grpc_channel, hello, self._changed.set, timeout_s=HANDSHAKE_TIMEOUT_S
                    ) as link:
                        await self._adopt(link.executor, grpc_channel)
                        self.link, self.state_reason = link, "an executor is connected"
                        on_state(True)
                        delay_s = RECONNECT_DELAY_S
                        await self._iterate(link)
                except LinkLostError as error:
                    self.state_reason = str(error)
                    log.warning("executor_lost", reason=str(error), num_requests=len(self._streams))
                finally:
                    self.link = None
                    on_state(False)
                await asyncio.sleep(random.uniform(*delay_s))

    async def _adopt(self, executor: ExecutorInfo, grpc_channel: grpc.aio.Channel) -> None:
        """Take a new executor in: the first one founds the core, a later one must serve the same model."""
        if self.core is None or self.model is None:
            tokenizer = Tokenizer.from_files(await executor_link.fetch_tokenizer(grpc_channel))
            self.model = self._serve(executor, tokenizer)
            self.core = self._found_core(executor, self.model.max_model_len)
        else:
            _check_same(self.model.executor, executor)
            self._deliver(self.core.reset(executor.epoch, executor.num_blocks))
            self.model = self._serve(executor, self.model.tokenizer)
        self._had_work = False
        self.stats.num_connections += 1
        log.info(
            "executor_connected",
            epoch=executor.epoch,
            model=executor.model.name,
            backend=executor.backend,
            dtype=executor.dtype,
            num_blocks=executor.num_blocks,
            block_size=executor.block_size,
            max_model_len=self.model.max_model_len,
        )

    def _serve(self, executor: ExecutorInfo, tokenizer: Tokenizer) -> ServedModel:
        lengths = [executor.max_model_len, executor.num_blocks * executor.block_size]
        if self.config.max_model_len is not None:
            lengths.append(self.config.max_model_len)
        return ServedModel(executor, tokenizer, min(lengths))

    def _found_core(self, executor: ExecutorInfo, max_model_len: int) -> Scheduler:
        core_config = CoreConfig(
            block_size=executor.block_size,
            num_blocks=executor.num_blocks,
            vocab_size=executor.model.vocab_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_prefill_chunk=self.config.max_prefill_chunk,
            watermark=self.config.watermark,
        )
        return Scheduler(core_config, epoch=executor.epoch, policy=self.config.policy, batching=self.config.batching)

    # -- one iteration after another -------------------------------------------------------------------------------

    async def _iterate(self, link: ExecutorLink) -> None:
        assert self.core is not None
        self._changed.set()
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._apply_results(link, self.core)
            await self._send_plans(link, self.core)

    def _apply_results(self, link: ExecutorLink, core: Scheduler) -> None:
        while link.results:
            result = link.results.popleft()
            try:
                outputs = core.apply(result, self._clock())
            except ResultMismatchError as error:
                cause = ServiceError(
                    grpc.StatusCode.INTERNAL, Reason.INTERNAL, f"the executor answered garbage: {error}"
                )
                raise LinkLostError(cause) from error
            self.stats.received(result.timings, had_work=self._had_work)
            self._had_work = core.num_running + core.num_waiting > 0
            self._deliver(outputs)
        if link.lost is not None:
            raise LinkLostError(link.lost)

    async def _send_plans(self, link: ExecutorLink, core: Scheduler) -> None:
        while core.num_in_flight_steps < MAX_STEPS_IN_FLIGHT:
            plan = core.schedule(self._clock())
            if plan is None:
                return
            self.stats.sent(await link.send(plan))

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request.request_id)
            if stream is not None:
                stream.feed(output)
                self._pump.mark(stream)

    def _digest(self, stream: RequestStream) -> None:
        stream.digest(lambda: self._finish_in_core(stream))
        if stream.ending is not None:
            self._forget(stream)

    # -- requests --------------------------------------------------------------------------------------------------

    def serving(self) -> ServedModel:
        """The model. Raises ServiceError UNAVAILABLE before the first handshake and while draining."""
        if self.draining:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, "the scheduler is draining")
        if self.model is None:
            message = f"no executor at {self.config.executor_address} yet: {self.state_reason}"
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.NO_EXECUTOR, message, retry_after_s=1.0)
        return self.model

    def submit(self, generation: Generation) -> RequestStream:
        """Queue a checked request. Raises ServiceError when its id is in use, the queue is full or it can never fit."""
        model, request = self.serving(), generation.request
        assert self.core is not None
        if self.core.num_waiting >= self.config.max_waiting:
            message = f"{self.core.num_waiting} requests are waiting, at most {self.config.max_waiting} may"
            raise ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL, message, retry_after_s=1.0)
        if request.request_id in self._streams:
            raise _in_use(request.request_id)
        try:
            self.core.add(request, self._clock())
        except DuplicateRequestError as error:
            raise _in_use(request.request_id) from error
        except RequestTooLargeError as error:
            raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, Reason.REQUEST_TOO_LARGE, str(error)) from error
        answer = AnswerText(
            model.tokenizer,
            stop_strings=generation.stop_strings,
            include_stop=generation.include_stop,
            skip_special_tokens=generation.skip_special_tokens,
        )
        stream = RequestStream(request, answer, model.tokenizer.token_bytes, self._clock)
        self._streams[request.request_id] = stream
        self.num_requests += 1
        self._changed.set()
        return stream

    def release(self, stream: RequestStream) -> None:
        """Its call is over: whatever of it still runs is cancelled, and its seat and blocks are free at once."""
        if stream.ending is None:
            stats = self._finish_in_core(stream)
            cancelled = ServiceError(grpc.StatusCode.CANCELLED, Reason.CANCELLED, "the call was cancelled")
            stream.fail(cancelled, stats or RequestStats(arrival_time=self._clock()))
            self._forget(stream)

    def _finish_in_core(self, stream: RequestStream) -> RequestStats | None:
        assert self.core is not None
        stats = self.core.finish(stream.request.request_id)
        self._changed.set()
        return stats

    def _forget(self, stream: RequestStream) -> None:
        """The request has ended: its id is free, and its canonical line is due."""
        if self._streams.get(stream.request.request_id) is not stream:
            return
        del self._streams[stream.request.request_id]
        ending = stream.ending
        assert ending is not None
        self.outcomes[ending.reason] += 1
        times = timings(ending.stats, self._clock())
        log.info(
            "request_finished",
            request_id=stream.request.request_id,
            tenant=stream.request.tenant,
            reason=ending.reason,
            num_prompt_tokens=len(stream.request.prompt_token_ids),
            num_output_tokens=ending.num_output_tokens,
            queued_ms=round(times.queued_ms, 2),
            first_token_ms=round(times.first_token_ms, 2),
            total_ms=round(times.total_ms, 2),
            num_preemptions=times.num_preemptions,
        )


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


def _in_use(request_id: str) -> ServiceError:
    message = f"request_id: {request_id!r} is in use by a running request"
    return ServiceError(grpc.StatusCode.ALREADY_EXISTS, Reason.REQUEST_ID_IN_USE, message, field="request_id")
