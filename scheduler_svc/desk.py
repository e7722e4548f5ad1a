"""Where requests come in and answers go out: every stream that has not ended, and the limits on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import grpc
import structlog

from everystop.errors import Reason, ServiceError
from everystop.settings import SchedulerConfig
from scheduler_svc.core import DuplicateRequestError, Output, Request, RequestStats, RequestTooLargeError, Scheduler
from scheduler_svc.delivery import DeliveryPump
from scheduler_svc.ledger import Ledger
from scheduler_svc.stream import RequestStream
from scheduler_svc.validation import Generation, ServedModel

_RETRY_AFTER_S = 1.0

log = structlog.get_logger()


class RequestDesk:
    """Streams by request id. `on_change` is called when the core has something new to decide."""

    def __init__(self, config: SchedulerConfig, on_change: Callable[[], None], clock: Callable[[], float]) -> None:
        self.is_closing = False
        """No new requests: the scheduler drains."""
        self.ledger = Ledger(clock)
        self.empty = asyncio.Event()
        """Set while no request is in: each has ended, and its call has returned, so that its client has the answer."""
        self.empty.set()
        self._config = config
        self._on_change = on_change
        self._clock = clock
        self._model: ServedModel | None = None
        self._core: Scheduler | None = None
        self._streams: dict[str, RequestStream] = {}
        self._num_calls = 0
        self._num_checking = 0
        self._timers: dict[RequestStream, list[asyncio.TimerHandle]] = {}
        self._pump = DeliveryPump(self._digest)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def num_unread(self) -> int:
        """Requests that have ended while their calls, which have something left to write, have not."""
        return self._num_calls - len(self._streams)

    @property
    def request_ids(self) -> list[str]:
        """Their ids, the oldest first."""
        return list(self._streams)

    def open(self, model: ServedModel, core: Scheduler) -> None:
        """There is an executor, and so a core to hand requests to."""
        self._model, self._core = model, core

    def check_open(self) -> None:
        """Raise ServiceError UNAVAILABLE while draining."""
        if self.is_closing:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.DRAINING, "the scheduler is draining")

    async def run(self) -> None:
        """Deliver, for ever."""
        await self._pump.run()

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Around the check of a request. Raises ServiceError when there is no room: it would be for nothing."""
        self._check_room()
        self._num_checking += 1
        try:
            yield
        finally:
            self._num_checking -= 1

    def submit(self, generation: Generation, *, traceparent: str = "") -> RequestStream:
        """Queue a checked request. Raises ServiceError when its id is in use, the queue is full or it can never fit.

        `traceparent` is the trace context of its call, empty when there is none.
        """
        self.check_open()
        assert self._core is not None
        assert self._model is not None, "there is a model to check a request against"
        request = generation.request
        if request.request_id in self._streams:
            raise _in_use(request.request_id)
        trace = self.ledger.begin_trace(request, traceparent)
        if trace is not None:
            request = replace(request, traceparent=trace.traceparent)
        if not generation.has_ended:
            try:
                self._queue(request)
            except ServiceError as error:
                if trace is not None:
                    trace.refuse(error.message)
                raise
        stream = RequestStream(request, generation.answer, self._model.tokenizer.token_bytes, self._clock)
        stream.trace = trace
        self._streams[request.request_id] = stream
        self._num_calls += 1
        self._start_timers(stream)
        self.ledger.submitted()
        self.empty.clear()
        if generation.has_ended:
            stream.finish_at_once(RequestStats(arrival_time=self._clock()))
            self._forget(stream)
        self._on_change()
        return stream

    def deliver(self, outputs: list[Output]) -> None:
        """Remember what a step brought; the pump does the rest when it is their turn."""
        token_clocks = []
        for output in outputs:
            stream = self._streams.get(output.request.request_id)
            if stream is not None:
                stream.feed(output)
                self._pump.mark(stream)
                if output.token_ids:
                    token_clocks.append(stream.token_clock)
        self.ledger.tokens_arrived(token_clocks)

    def release(self, stream: RequestStream) -> None:
        """Its call is over: whatever of it still runs is cancelled, and its seat and blocks are free at once."""
        self.end(stream, ServiceError(grpc.StatusCode.CANCELLED, Reason.CANCELLED, "the call was cancelled"))

    def returned(self) -> None:
        """The call of a request has returned, and its status is sent."""
        self._num_calls -= 1
        if not self._num_calls:
            self.empty.set()

    def end(self, stream: RequestStream, error: ServiceError) -> None:
        """End a request with an error, unless it has ended."""
        if stream.ending is None:
            stats = self._finish_in_core(stream)
            stream.fail(error, stats or RequestStats(arrival_time=self._clock()))
            self._forget(stream)

    def end_all(self, error: ServiceError) -> None:
        """End every request with an error."""
        for stream in list(self._streams.values()):
            self.end(stream, error)

    def _queue(self, request: Request) -> None:
        assert self._core is not None
        self._check_queue(len(request.prompt_token_ids) + len(request.answer_token_ids))
        try:
            self._core.add(request, self._clock())
        except DuplicateRequestError as error:
            raise _in_use(request.request_id) from error
        except RequestTooLargeError as error:
            raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, Reason.REQUEST_TOO_LARGE, str(error)) from error

    def _check_room(self) -> None:
        assert self._core is not None
        max_waiting, max_in = self._config.max_waiting, self._config.max_waiting + self._config.max_num_seqs
        for num_requests, max_requests, where in (
            (self._core.num_waiting, max_waiting, "are waiting"),
            (self._num_checking, max_in, "are being checked"),
            (self.num_unread, max_in, "have an answer that their clients have not read"),
        ):
            if num_requests >= max_requests:
                raise _queue_full(f"{num_requests} requests {where}, at most {max_requests} may")

    def _check_queue(self, num_request_tokens: int) -> None:
        assert self._core is not None
        num_waiting, num_tokens = self._core.num_waiting, self._core.num_waiting_tokens
        max_waiting, max_tokens = self._config.max_waiting, self._config.max_waiting_tokens
        if num_waiting >= max_waiting:
            raise _queue_full(f"{num_waiting} requests are waiting, at most {max_waiting} may")
        if num_waiting and num_tokens + num_request_tokens > max_tokens:
            raise _queue_full(
                f"{num_tokens} tokens are waiting, and {num_request_tokens} more are over the {max_tokens} that may"
            )

    def _start_timers(self, stream: RequestStream) -> None:
        limits = ((self._config.max_wait_s, self._expire_waiting), (self._config.max_request_s, self._expire))
        timers = [
            asyncio.get_running_loop().call_later(limit_s, expire, stream)
            for limit_s, expire in limits
            if limit_s is not None
        ]
        if timers:
            self._timers[stream] = timers

    def _expire_waiting(self, stream: RequestStream) -> None:
        assert self._core is not None
        sequence = self._core.requests.get(stream.request.request_id)
        if sequence is not None and sequence.first_scheduled_time is None:
            self.end(stream, _time_limit(f"waited for {self._config.max_wait_s:g} s, the longest that a request may"))

    def _expire(self, stream: RequestStream) -> None:
        self.end(stream, _time_limit(f"took {self._config.max_request_s:g} s, the longest that a request may"))

    def _digest(self, stream: RequestStream) -> None:
        try:
            stream.digest(lambda: self._finish_in_core(stream))
        except Exception:  # a bug ends this one request, not the delivery to all others
            log.exception("digest_failed", request_id=stream.request.request_id)
            message = "a bug in the scheduler ended the request; its log says more"
            self.end(stream, ServiceError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, message))
        if stream.ending is not None:
            self._forget(stream)

    def _finish_in_core(self, stream: RequestStream) -> RequestStats | None:
        assert self._core is not None
        stats = self._core.finish(stream.request.request_id)
        self._on_change()
        return stats

    def _forget(self, stream: RequestStream) -> None:
        """The request has ended: its id is free, and its canonical line is due."""
        if self._streams.get(stream.request.request_id) is not stream:
            return
        del self._streams[stream.request.request_id]
        for timer in self._timers.pop(stream, ()):
            timer.cancel()
        assert stream.ending is not None
        self.ledger.ended(stream, stream.ending)


def _in_use(request_id: str) -> ServiceError:
    message = f"request_id: {request_id!r} is in use by a running request"
    return ServiceError(grpc.StatusCode.ALREADY_EXISTS, Reason.REQUEST_ID_IN_USE, message, field="request_id")


def _queue_full(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL, message, retry_after_s=_RETRY_AFTER_S)


def _time_limit(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, Reason.TIME_LIMIT, f"the request {message}")
