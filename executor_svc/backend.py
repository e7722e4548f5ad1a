"""What every backend meets: the real model, and the mock.

The engine (`engine.py`) turns each plan into a `StepBatch` with the help of the seats (`seats.py`), hands it to the
backend and sends what comes back. A backend sees sequences and blocks, never plans or the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from everystop.plan import ModelInfo, SamplingParams, SequenceFailure, SequenceLogprobs


@dataclass(slots=True, eq=False)
class Seat:
    """One sequence in its slot. The seats keep it up to date; a backend only reads it."""

    slot: int
    request_id: str
    attempt: int
    token_ids: list[int]
    """Known tokens: prompt and answer so far. Grows by one with every sampled token."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values stand in the cache, before the step at hand."""
    block_ids: list[int]
    """Block table: token i lives in block `block_ids[i // block_size]` at offset `i % block_size`."""
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence's part in one step: computes `num_tokens` known tokens from `seat.num_computed_tokens` on."""

    seat: Seat
    num_tokens: int
    samples: bool
    """Whether the last of them is the last known token, so that the step chooses the next one."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step: who comes, who goes, and what is computed."""

    step_id: int
    exited: list[Seat]
    """Left since the last step; a backend that keeps state by slot drops it, before it takes in `admitted`."""
    admitted: list[Seat]
    scheduled: list[ScheduledSequence]
    """Ascending by slot, never empty sequences."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought."""

    token_ids: list[int]
    """One for each scheduled sequence that samples, in their order; 0 for one that failed."""
    logprobs: list[SequenceLogprobs] = field(default_factory=list)
    failures: list[SequenceFailure] = field(default_factory=list)
    forward_us: int = 0
    sample_us: int = 0


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a backend offers; fixed for its lifetime."""

    name: str
    device: str
    dtype: str
    model: ModelInfo
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Backend(Protocol):
    """Runs steps. All calls come from one thread, one at a time."""

    @property
    def info(self) -> BackendInfo:
        """What it offers."""
        ...

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The tokenizer as files by name.

        `tokenizer.json` always; `chat_template.jinja`, `tokenizer_config.json` and `special_tokens_map.json` where the
        model has them.
        """
        ...

    def execute(self, batch: StepBatch) -> StepOutput:
        """Compute one step: write keys and values of all scheduled tokens, sample where asked."""
        ...

    def reset(self) -> None:
        """Forget every sequence; the next batch starts with empty seats."""
        ...

    def close(self) -> None:
        """Release what the backend holds."""
        ...
