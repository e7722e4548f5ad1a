"""Clients of the scheduler: `AsyncClient` for asyncio, `Client` for everything else, with the same methods.

    with Client("127.0.0.1:50051") as client:
        for event in client.generate("The capital of France is", max_tokens=16, temperature=0):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)

An answer whose stream breaks, because the scheduler is killed or restarted, goes on where it was; `Retry` says how long
a client tries. Every other refusal, and a missed deadline, is an `everystop.errors.ServiceError`.
"""

from everystop.client.aio import AsyncClient
from everystop.client.events import (
    Accepted,
    Completion,
    Delta,
    Event,
    Finished,
    FinishReason,
    Timings,
    TokenLogprobs,
    TopLogprob,
    Usage,
    completion_from_events,
)
from everystop.client.requests import ChatMessage, GenerateOptions, Prompt
from everystop.client.retry import Retry
from everystop.client.sync import Client

__all__ = [
    "Accepted",
    "AsyncClient",
    "ChatMessage",
    "Client",
    "Completion",
    "Delta",
    "Event",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Prompt",
    "Retry",
    "Timings",
    "TokenLogprobs",
    "TopLogprob",
    "Usage",
    "completion_from_events",
]
