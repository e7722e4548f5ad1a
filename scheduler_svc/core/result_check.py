"""Whether a result can be the answer to a plan."""

from __future__ import annotations

from collections.abc import Iterable

from everystop.plan import SequenceLogprobs, StepResult
from scheduler_svc.core.errors import ResultMismatchError
from scheduler_svc.core.step import InFlightStep


def check_result(result: StepResult, step: InFlightStep, vocab_size: int) -> None:
    """Raise ResultMismatchError unless `result` answers `step` completely, with nothing besides."""
    if result.step_id != step.step_id:
        raise ResultMismatchError(f"result of step {result.step_id}, but the oldest in flight is {step.step_id}")
    if len(result.token_ids) != len(step.sampling):
        raise ResultMismatchError(f"{len(result.token_ids)} tokens from {len(step.sampling)} sequences that sample")
    _check_vocabulary(result.token_ids, vocab_size)
    failed_slots = _check_failures(result, step)
    _check_logprobs(result, step, failed_slots, vocab_size)


def _check_vocabulary(token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ResultMismatchError(f"token {token_id} is not in the vocabulary of {vocab_size}")


def _check_failures(result: StepResult, step: InFlightStep) -> set[int]:
    failed_slots = {failure.slot for failure in result.failures}
    if not failed_slots:
        return failed_slots
    if len(failed_slots) != len(result.failures):
        raise ResultMismatchError("a slot fails twice in one step")
    slots = {seating.slot for seating in step.participants()}
    if not failed_slots <= slots:
        raise ResultMismatchError(f"slots {sorted(failed_slots - slots)} fail, but have no part in the step")
    return failed_slots


def _check_logprobs(result: StepResult, step: InFlightStep, failed_slots: set[int], vocab_size: int) -> None:
    # (slot, is_prompt) to the tokens that the rows must be about and the most alternatives of each.
    expected: dict[tuple[int, bool], tuple[list[int], int]] = {}
    for seating, token_id in zip(step.sampling, result.token_ids, strict=True):
        num_logprobs = seating.sequence.request.sampling.num_logprobs
        if num_logprobs is not None:
            expected[seating.slot, False] = [token_id], num_logprobs
    for chunk in step.chunks:
        if token_ids := chunk.prompt_row_token_ids():
            max_num_top = chunk.seating.sequence.request.sampling.num_prompt_logprobs or 0
            expected[chunk.seating.slot, True] = token_ids, max_num_top
    for entry in result.logprobs:
        kind = "prompt" if entry.is_prompt else "sampled"
        if (entry.slot, entry.is_prompt) not in expected:
            raise ResultMismatchError(f"{kind} logprobs of slot {entry.slot} were not asked for, or came twice")
        token_ids, max_num_top = expected.pop((entry.slot, entry.is_prompt))
        # One that failed has no token and no rows to speak of; whatever it sends is dropped with it.
        if entry.slot not in failed_slots:
            _check_rows(entry, token_ids, max_num_top, vocab_size)
    missing_slots = {slot for slot, _ in expected} - failed_slots
    if missing_slots:
        raise ResultMismatchError(f"logprobs of slots {sorted(missing_slots)} are missing")


def _check_rows(entry: SequenceLogprobs, token_ids: list[int], max_num_top: int, vocab_size: int) -> None:
    if entry.token_ids != token_ids:
        raise ResultMismatchError(f"logprobs of slot {entry.slot} are about other tokens than its own")
    num_alternatives = len(token_ids) * entry.num_top
    if not (
        0 <= entry.num_top <= max_num_top
        and len(entry.logprobs) == len(token_ids)
        and len(entry.top_token_ids) == len(entry.top_logprobs) == num_alternatives
    ):
        raise ResultMismatchError(f"logprobs of slot {entry.slot} have the wrong shape")
    _check_vocabulary(entry.top_token_ids, vocab_size)
