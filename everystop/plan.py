"""The step stream in plain Python: what the scheduler decides and what the executor answers.

These are the types that the scheduler's core, the executor, the mock and the tests share. `plan_codec` turns them into
protobuf messages and back; `protos/everystop/executor/v1/executor.proto` says what each field means on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; every default is filled in. Ranges are checked at the scheduler's edge."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """Unsigned 64 bits."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias), ascending by id."""
    allowed_token_ids: tuple[int, ...] = ()
    """Empty allows all."""
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    """Never chosen before `min_tokens` tokens: end-of-sequence (unless ignored) and stop tokens."""
    num_logprobs: int | None = None
    """None: not asked for. 0: of the chosen token alone. Else also of this many most likely tokens."""
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that is new to the executor, whole."""

    slot: int
    request_id: str
    attempt: int
    token_ids: list[int]
    """Prompt and answer so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: SamplingParams
    traceparent: str = ""
    """Trace context of its request; empty when it is not traced."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What changes in this step; what is not named goes on as before. Applied in the order of the fields."""

    step_id: int
    epoch: int
    exit_slots: list[int] = field(default_factory=list)
    admissions: list[NewSequence] = field(default_factory=list)
    block_slots: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    chunk_slots: list[int] = field(default_factory=list)
    chunk_num_tokens: list[int] = field(default_factory=list)
    idle_slots: list[int] = field(default_factory=list)
    num_seqs: int = 0
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SequenceLogprobs:
    """Log-probabilities of one sequence in one step: of its sampled token, or of prompt tokens (row after row)."""

    slot: int
    is_prompt: bool
    token_ids: list[int]
    logprobs: list[float]
    num_top: int
    top_token_ids: list[int]
    """`len(token_ids) * num_top`, best first in each row."""
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """A sequence that a step could not compute, such as one whose logits are not finite."""

    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Measured by the executor, in microseconds."""

    waited_us: int = 0
    """How long it stood idle before the plan was there."""
    forward_us: int = 0
    sample_us: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step brought."""

    step_id: int
    token_ids: list[int]
    """One for each sequence that sampled, in ascending order of slots; 0 for one that failed."""
    logprobs: list[SequenceLogprobs] = field(default_factory=list)
    failures: list[SequenceFailure] = field(default_factory=list)
    timings: StepTimings = StepTimings()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an executor serves."""

    name: str
    fingerprint: str
    """Equal for equal weights, configuration and tokenizer."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: str


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an executor tells at the handshake."""

    epoch: int
    model: ModelInfo
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    backend: str
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Hello:
    """What a scheduler tells at the handshake."""

    max_num_seqs: int
    max_num_batched_tokens: int
    protocol_version: int = PROTOCOL_VERSION
