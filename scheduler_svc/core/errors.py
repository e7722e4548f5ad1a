"""What the core refuses. Out of a resource is never an error: the core waits, or preempts."""

from __future__ import annotations


class CoreError(Exception):
    """Base of the errors below; whatever raises one has changed nothing."""


class DuplicateRequestError(CoreError):
    """A request with this id has not ended yet."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id!r} has not ended yet")
        self.request_id = request_id


class RequestTooLargeError(CoreError):
    """A request that would not fit even alone."""

    def __init__(
        self,
        request_id: str,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        num_blocks_needed: int,
        num_blocks_available: int,
        max_model_len: int,
        max_tokens_that_fit: int,
    ) -> None:
        super().__init__(
            f"{num_prompt_tokens} prompt tokens and max_tokens={max_tokens} need {num_blocks_needed} KV blocks of "
            f"{num_blocks_available} and at most {max_model_len} tokens in all; "
            f"the largest max_tokens that fits this prompt is {max_tokens_that_fit}"
        )
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.num_blocks_needed = num_blocks_needed
        self.num_blocks_available = num_blocks_available
        self.max_model_len = max_model_len
        self.max_tokens_that_fit = max_tokens_that_fit
        """0 when the prompt alone is too long."""


class ResultMismatchError(CoreError):
    """A result that can't be the answer to the oldest plan in flight: the executor is broken, or the stream is."""
