"""What a plan must be like whatever the seats hold: the checks that need only the plan and the limits.

Every refusal is a `ServiceError` INVALID_ARGUMENT with reason INVALID_PLAN that names the field and the limit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from everystop.errors import Reason, ServiceError
from everystop.plan import Hello, NewSequence, SamplingParams, StepPlan
from executor_svc.backend import BackendInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the plans of one session: what the backend offers, and what the scheduler said at the handshake."""

    vocab_size: int
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @classmethod
    def of(cls, backend: BackendInfo, hello: Hello) -> Limits:
        """The limits of a session that `hello` opens."""
        return cls(
            vocab_size=backend.model.vocab_size,
            block_size=backend.block_size,
            num_blocks=backend.num_blocks,
            max_model_len=backend.max_model_len,
            max_num_seqs=hello.max_num_seqs,
            max_num_batched_tokens=hello.max_num_batched_tokens,
        )


def invalid_plan(field: str, message: str) -> ServiceError:
    """The refusal of a plan for what stands in `field`."""
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_PLAN, f"{field}: {message}", field=field)


def check_plan(plan: StepPlan, limits: Limits) -> None:
    """Lengths of parallel lists, ranges of slots, blocks and tokens. Raises ServiceError."""
    _check_parallel("block_slots", plan.block_slots, "block_ids", plan.block_ids)
    _check_parallel("chunk_slots", plan.chunk_slots, "chunk_num_tokens", plan.chunk_num_tokens)
    _check_distinct("exit_slots", plan.exit_slots)
    _check_distinct("admissions.slot", [admission.slot for admission in plan.admissions])
    _check_distinct("chunk_slots", plan.chunk_slots)
    _check_distinct("idle_slots", plan.idle_slots)
    _check_range("block_ids", plan.block_ids, limits.num_blocks, "num_blocks")
    for index, admission in enumerate(plan.admissions):
        _check_admission(f"admissions[{index}]", admission, limits)


def _check_admission(field: str, admission: NewSequence, limits: Limits) -> None:
    num_tokens = len(admission.token_ids)
    _check_range(f"{field}.slot", [admission.slot], limits.max_num_seqs, "max_num_seqs")
    if not 1 <= num_tokens <= limits.max_model_len:
        raise invalid_plan(f"{field}.token_ids", f"{num_tokens} tokens, not 1 to max_model_len {limits.max_model_len}")
    _check_range(f"{field}.token_ids", admission.token_ids, limits.vocab_size, "vocab_size")
    if not 1 <= admission.num_prompt_tokens <= num_tokens:
        raise invalid_plan(f"{field}.num_prompt_tokens", f"{admission.num_prompt_tokens}, not 1 to {num_tokens} tokens")
    if not 0 <= admission.num_computed_tokens < num_tokens:
        raise invalid_plan(
            f"{field}.num_computed_tokens", f"{admission.num_computed_tokens}, not below the {num_tokens} known tokens"
        )
    _check_range(f"{field}.block_ids", admission.block_ids, limits.num_blocks, "num_blocks")
    _check_distinct(f"{field}.block_ids", admission.block_ids)
    _check_sampling(f"{field}.sampling", admission.sampling, limits.vocab_size)


def _check_sampling(field: str, sampling: SamplingParams, vocab_size: int) -> None:
    for name, token_ids in (
        ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("banned_token_ids", sampling.banned_token_ids),
        ("end_token_ids", sampling.end_token_ids),
    ):
        _check_range(f"{field}.{name}", token_ids, vocab_size, "vocab_size")
    for name, value, is_valid, wanted in (
        ("temperature", sampling.temperature, sampling.temperature >= 0, "at least 0"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "in [0, 1]"),
        ("repetition_penalty", sampling.repetition_penalty, sampling.repetition_penalty > 0, "above 0"),
        ("presence_penalty", sampling.presence_penalty, True, "finite"),
        ("frequency_penalty", sampling.frequency_penalty, True, "finite"),
    ):
        if not (is_valid and math.isfinite(value)):
            raise invalid_plan(f"{field}.{name}", f"{value}, not {wanted}")
    for token_id, bias in sampling.logit_bias:
        if not math.isfinite(bias):
            raise invalid_plan(f"{field}.logit_bias", f"{bias} for token {token_id}, not finite")
    for name, num_top in (
        ("num_logprobs", sampling.num_logprobs),
        ("num_prompt_logprobs", sampling.num_prompt_logprobs),
    ):
        if num_top is not None and num_top > vocab_size:
            raise invalid_plan(f"{field}.{name}", f"{num_top}, above vocab_size {vocab_size}")


def _check_parallel(field: str, values: Sequence[int], other_field: str, other_values: Sequence[int]) -> None:
    if len(values) != len(other_values):
        raise invalid_plan(other_field, f"{len(other_values)} entries beside {len(values)} in {field}")


def _check_distinct(field: str, values: Sequence[int]) -> None:
    if len(set(values)) != len(values):
        duplicate = next(value for value, num_times in Counter(values).items() if num_times > 1)
        raise invalid_plan(field, f"{duplicate} occurs more than once")


def _check_range(field: str, values: Sequence[int], limit: int, limit_name: str) -> None:
    if values and not 0 <= min(values) <= max(values) < limit:
        culprit = next(value for value in values if not 0 <= value < limit)
        raise invalid_plan(field, f"{culprit} is not below {limit_name} {limit}")
