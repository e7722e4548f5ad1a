"""What a stream brings, in plain Python; `protos/everystop/scheduler/v1/inference.proto` says what each field means."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc

from everystop.errors import Reason, ServiceError
from everystop.scheduler.v1 import inference_pb2 as pb


class FinishReason(enum.StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """End of sequence, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of the model's length."""
    UNKNOWN = "unknown"
    """One that a newer scheduler knows and this client does not."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most likely tokens at a position."""

    token_id: int
    logprob: float
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one token, and of the most likely ones: natural, of the model's own distribution."""

    token_id: int
    logprob: float
    token_bytes: bytes
    top: tuple[TopLogprob, ...] = ()
    """Best first."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event: the request is in the queue."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    seed: int
    """The seed in use; sent again, it brings the same answer."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens. The texts of all deltas put together are the answer; `text` may lag behind `token_ids`."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, when asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """For the tokens of the prompt from the second on, when asked for."""


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens went in, were reused, and came out."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Measured by the scheduler, in milliseconds since it accepted the request."""

    queued_ms: float
    first_token_ms: float
    total_ms: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event."""

    reason: FinishReason
    matched_stop: str | int | None
    """The stop string or the token id that ended it, when the reason is STOP."""
    usage: Usage
    timings: Timings


Event = Accepted | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    seed: int
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


def event_from_response(response: pb.GenerateResponse) -> Event | None:
    """The event in a message of the stream; None for a kind that only a newer scheduler knows."""
    match response.WhichOneof("event"):
        case "accepted":
            accepted = response.accepted
            return Accepted(accepted.request_id, accepted.num_prompt_tokens, accepted.num_cached_tokens, accepted.seed)
        case "delta":
            delta = response.delta
            return Delta(
                tuple(delta.token_ids), delta.text, _logprobs(delta.logprobs), _logprobs(delta.prompt_logprobs)
            )
        case "finished":
            return _finished(response.finished)
        case _:
            return None


def completion_from_events(events: Iterable[Event]) -> Completion:
    """Put the events of one whole stream together.

    Raises ServiceError (INTERNAL) for a stream that lacks its first or its last event.
    """
    accepted: Accepted | None = None
    finished: Finished | None = None
    deltas: list[Delta] = []
    for event in events:
        match event:
            case Accepted():
                accepted = event
            case Delta():
                deltas.append(event)
            case Finished():
                finished = event
    if accepted is None or finished is None:
        raise ServiceError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, "the stream ended before its last event")
    return Completion(
        request_id=accepted.request_id,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finish_reason=finished.reason,
        matched_stop=finished.matched_stop,
        seed=accepted.seed,
        usage=finished.usage,
        timings=finished.timings,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
    )


_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


def _finished(finished: pb.Finished) -> Finished:
    matched: str | int | None = None
    match finished.WhichOneof("matched_stop"):
        case "stop_string":
            matched = finished.stop_string
        case "stop_token_id":
            matched = finished.stop_token_id
    usage, timings = finished.usage, finished.timings
    return Finished(
        reason=_FINISH_REASONS.get(finished.reason, FinishReason.UNKNOWN),
        matched_stop=matched,
        usage=Usage(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens),
        timings=Timings(timings.queued_ms, timings.first_token_ms, timings.total_ms, timings.num_preemptions),
    )


def _logprobs(entries: Sequence[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            entry.token_id,
            entry.logprob,
            entry.token_bytes,
            tuple(TopLogprob(top.token_id, top.logprob, top.token_bytes) for top in entry.top),
        )
        for entry in entries
    )
