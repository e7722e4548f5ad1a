"""What goes into the core and what comes out of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from everystop.plan import SamplingParams, SequenceLogprobs


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. Checked at the edge: lengths fit the model, ids lie in the vocabulary."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    """At least 1; prompt and answer fit into `max_model_len`."""
    eos_token_ids: frozenset[int] = frozenset()
    """Those that end it; empty when end-of-sequence is ignored."""
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    tenant: str = ""
    traceparent: str = ""
    """Its trace context, for the executor; empty when it is not traced."""
    answer_token_ids: list[int] = field(default_factory=list)
    """Tokens that the answer begins with, observed before the request came here; fewer than `max_tokens`, and none of
    them ends it. Outputs bring what comes after them."""

    def finish_reason(self, token_id: int, num_answer_tokens: int) -> FinishReason | None:
        """Why the answer ends with `token_id`, which makes it `num_answer_tokens` long; None when it goes on."""
        if token_id in self.eos_token_ids:
            return FinishReason.EOS
        if token_id in self.stop_token_ids:
            return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if num_answer_tokens == self.max_tokens else None


class FinishReason(enum.Enum):
    """Why the core ended a request. One that the shell ends (`Scheduler.finish`) makes no event."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    FAILED = "failed"
    """The executor could not compute it."""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What a request went through. Times are the `now` that the core was given, in seconds."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    num_attempts: int = 0
    """How often it was seated."""
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache when it was first seated."""
    num_recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended."""

    reason: FinishReason
    stats: RequestStats
    token_id: int | None = None
    """The token that ended it, for EOS and STOP_TOKEN."""
    message: str = ""
    """Why it failed, for FAILED."""


@dataclass(frozen=True, slots=True)
class Output:
    """What one step brought one request."""

    request: Request
    token_ids: list[int]
    """New tokens, the one that ends it included."""
    logprobs: SequenceLogprobs | None = None
    prompt_logprobs: list[SequenceLogprobs] = field(default_factory=list)
    finish: Finish | None = None
