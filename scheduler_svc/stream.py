"""One request's answer on its way from the loop to its client.

Three parties touch a stream, each at its own pace, all on one event loop:

    the loop      feed(output)        remembers, O(1)
    the pump      digest()            detokenizes, looks for stop strings, appends to the pending delta
    the client    events()            takes the whole pending delta, so that one that lags gets fewer and larger ones
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from everystop.errors import Reason, ServiceError
from everystop.plan import SequenceLogprobs
from everystop.scheduler.v1 import inference_pb2 as pb
from scheduler_svc.core.request import Finish, FinishReason, Output, Request, RequestStats
from scheduler_svc.frontend.answer import AnswerText
from scheduler_svc.latencies import TokenClock

if TYPE_CHECKING:
    from scheduler_svc.tracing import RequestTrace

_FINISH_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_STOP,
    FinishReason.STOP_TOKEN: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


MAX_DELTA_ROWS = 512
"""Most tokens (of prompt and answer) in one delta: what a lagging client gets at once stays a small message."""

MAX_DELTA_LOGPROBS = 2048
"""Most log-probabilities in one delta, beside those of its last token: building each takes a µs, all in one go."""


@dataclass(frozen=True, slots=True)
class _Row:
    """The log-probabilities of one token, as they came: messages are built when they are written."""

    entry: SequenceLogprobs
    index: int

    def to_message(self, token_bytes: Callable[[int], bytes]) -> pb.TokenLogprobs:
        entry = self.entry
        alternatives = slice(self.index * entry.num_top, (self.index + 1) * entry.num_top)
        pairs = zip(entry.top_token_ids[alternatives], entry.top_logprobs[alternatives], strict=True)
        return pb.TokenLogprobs(
            token_id=entry.token_ids[self.index],
            logprob=entry.logprobs[self.index],
            token_bytes=token_bytes(entry.token_ids[self.index]),
            top=[
                pb.TopLogprob(token_id=top_id, logprob=top_logprob, token_bytes=token_bytes(top_id))
                for top_id, top_logprob in pairs
            ],
        )


@dataclass(slots=True)
class _PendingDelta:
    """A delta while it grows. Text gathers in a list: appending to a protobuf string copies it each time."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[_Row] = field(default_factory=list)
    prompt_logprobs: list[_Row] = field(default_factory=list)
    num_logprobs: int = 0

    def is_full(self) -> bool:
        num_rows = len(self.token_ids) + len(self.prompt_logprobs)
        return num_rows >= MAX_DELTA_ROWS or self.num_logprobs >= MAX_DELTA_LOGPROBS

    def add_rows(self, rows: list[_Row], entry: SequenceLogprobs, indices: range) -> None:
        """Append rows of `entry` to `rows`, one of the two lists."""
        rows.extend([_Row(entry, index) for index in indices])
        self.num_logprobs += len(indices) * (1 + entry.num_top)

    def to_message(self, token_bytes: Callable[[int], bytes]) -> pb.Delta:
        return pb.Delta(
            token_ids=self.token_ids,
            text="".join(self.texts),
            logprobs=[row.to_message(token_bytes) for row in self.logprobs],
            prompt_logprobs=[row.to_message(token_bytes) for row in self.prompt_logprobs],
        )


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stream ended, for its last event and its log line."""

    reason: str
    stats: RequestStats
    num_output_tokens: int
    message: str = ""
    """What went wrong, for those that did not end as they should."""


class RequestStream:
    """See the module. `token_bytes` gives the bytes of a token id; `clock` the time in seconds."""

    def __init__(
        self,
        request: Request,
        answer: AnswerText,
        token_bytes: Callable[[int], bytes],
        clock: Callable[[], float],
    ) -> None:
        self.request = request
        self.ending: Ending | None = None
        """Set once nothing more will come."""
        self.token_clock = TokenClock(arrival_time=clock())
        self.trace: RequestTrace | None = None
        """Its trace, when it is traced."""
        self._answer = answer
        self._token_bytes = token_bytes
        self._clock = clock
        self._undigested: list[Output] = []
        self._pending: deque[_PendingDelta] = deque()
        self._finished: pb.Finished | None = None
        self._error: ServiceError | None = None
        self._changed = asyncio.Event()
        self._num_output_tokens = len(request.answer_token_ids)

    def feed(self, output: Output) -> None:
        """Remember what a step brought."""
        self._undigested.append(output)

    def fail(self, error: ServiceError, stats: RequestStats) -> None:
        """End the stream with an error, after what is pending."""
        if self.ending is None:
            self._error = error
            self._end(error.reason.value.lower(), stats, error.message)

    def digest(self, finish_in_core: Callable[[], RequestStats | None]) -> None:
        """Turn what was remembered into the pending delta and, maybe, the last event.

        When a stop string ends the answer, `finish_in_core` takes the request out of the core.
        """
        outputs, self._undigested = self._undigested, []
        for position, output in enumerate(outputs):
            if self.ending is not None:
                break
            matched_stop = self._digest_output(output)
            if matched_stop is not None:
                self._finish_at(matched_stop, self._stats_at_stop(outputs[position:], finish_in_core))
            elif output.finish is not None:
                self._finish_as_core_did(output.finish)
        self._changed.set()

    def finish_at_once(self, stats: RequestStats) -> None:
        """End a resumed answer of which the client has all tokens, and so all text."""
        token_ids = self.request.answer_token_ids
        if self._answer.matched_stop is not None:
            self._finish_at(self._answer.matched_stop, stats)
            return
        reason = self.request.finish_reason(token_ids[-1], len(token_ids))
        assert reason is not None, "the replay found an end"
        self._finish_as_core_did(Finish(reason, stats, None if reason is FinishReason.LENGTH else token_ids[-1]))

    def drop(self) -> None:
        """Forget what is pending; nobody reads it."""
        self._pending.clear()

    async def events(self) -> AsyncIterator[pb.GenerateResponse]:
        """Deltas as they come, then the last event. Raises ServiceError when the request failed."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._pending:
                yield pb.GenerateResponse(delta=self._pending.popleft().to_message(self._token_bytes))
            if self._error is not None:
                raise self._error
            if self._finished is not None:
                yield pb.GenerateResponse(finished=self._finished)
                return

    def _digest_output(self, output: Output) -> str | None:
        """Append one step's output to the pending deltas; returns the stop string that it completes, if any."""
        for entry in output.prompt_logprobs:
            for index in range(len(entry.token_ids)):
                delta = self._open_delta()
                delta.add_rows(delta.prompt_logprobs, entry, range(index, index + 1))
        if not output.token_ids:
            return None
        delta = self._open_delta()
        self._num_output_tokens += len(output.token_ids)
        delta.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            delta.add_rows(delta.logprobs, output.logprobs, range(len(output.logprobs.token_ids)))
        ends_with_stop_token = output.finish is not None and output.finish.token_id is not None
        text = self._answer.push(output.token_ids, ends_with_stop_token=ends_with_stop_token)
        delta.texts.append(text.text)
        return text.matched_stop

    def _stats_at_stop(
        self, outputs: Sequence[Output], finish_in_core: Callable[[], RequestStats | None]
    ) -> RequestStats:
        """Of a request that a stop string ends at the first of `outputs`; the core may have ended it at a later one."""
        for output in outputs:
            if output.finish is not None:
                return output.finish.stats
        return finish_in_core() or RequestStats(arrival_time=self.token_clock.arrival_time)

    def _open_delta(self) -> _PendingDelta:
        if not self._pending or self._pending[-1].is_full():
            self._pending.append(_PendingDelta())
        return self._pending[-1]

    def _finish_as_core_did(self, finish: Finish) -> None:
        if finish.reason is FinishReason.FAILED:
            error = ServiceError(grpc.StatusCode.INTERNAL, Reason.EXECUTION_FAILED, finish.message)
            self.fail(error, finish.stats)
            return
        rest = self._answer.finish()
        if rest:
            # Together with the last token, even in a full delta: who has that token has all text, so that a client
            # which resumes with it is sent the last event alone.
            self._pending[-1].texts.append(rest)
        if self._answer.matched_stop is not None:  # bytes that were held back completed it
            self._finish_at(self._answer.matched_stop, finish.stats)
            return
        event = pb.Finished(reason=_FINISH_REASONS[finish.reason])
        if finish.token_id is not None:
            event.stop_token_id = finish.token_id
        self._finish(event, finish.reason.value, finish.stats)

    def _finish_at(self, stop_string: str, stats: RequestStats) -> None:
        self._finish(pb.Finished(reason=pb.FINISH_REASON_STOP, stop_string=stop_string), "stop_string", stats)

    def _finish(self, event: pb.Finished, reason: str, stats: RequestStats) -> None:
        event.usage.num_prompt_tokens = len(self.request.prompt_token_ids)
        event.usage.num_cached_tokens = stats.num_cached_tokens
        event.usage.num_output_tokens = self._num_output_tokens
        event.timings.CopyFrom(timings(stats, self._clock()))
        self._finished = event
        self._end(reason, stats)

    def _end(self, reason: str, stats: RequestStats, message: str = "") -> None:
        self.ending = Ending(reason, stats, self._num_output_tokens, message)
        self._changed.set()


def timings(stats: RequestStats, now: float) -> pb.Timings:
    """Milliseconds since arrival; what has not happened yet counts up to `now`."""

    def since_arrival_ms(time_s: float | None) -> float:
        return ((now if time_s is None else time_s) - stats.arrival_time) * 1000

    return pb.Timings(
        queued_ms=since_arrival_ms(stats.first_scheduled_time),
        first_token_ms=since_arrival_ms(stats.first_token_time),
        total_ms=since_arrival_ms(now),
        num_preemptions=stats.num_preemptions,
    )
