"""Whether a result can be the answer to a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


@dataclass(slots=True)
class _Asked:
    """Logprobs that must come, the prompt's in one entry or several."""

    token_ids: list[int]
    """The tokens that rows must still come for, in their order."""
    num_top: int
    """Alternatives in each row."""


def _check_logprobs(result: StepResult, step: InFlightStep, failed_slots: set[int], vocab_size: int) -> None:
    missing = _asked_logprobs(step, result.token_ids, vocab_size)
    for entry in result.logprobs:
        asked = missing.get((entry.slot, entry.is_prompt))
        if asked is None or not asked.token_ids:
            kind = "prompt" if entry.is_prompt else "sampled"
            raise ResultMismatchError(f"{kind} logprobs of slot {entry.slot} were not asked for, or came twice")
        # One that failed has no token and no rows to speak of; whatever it sends is dropped with it.
        if entry.slot not in failed_slots:
            _check_rows(entry, asked, vocab_size)
            del asked.token_ids[: len(entry.token_ids)]
    missing_slots = {slot for (slot, _), asked in missing.items() if asked.token_ids} - failed_slots
    if missing_slots:
        raise ResultMismatchError(f"logprobs of slots {sorted(missing_slots)} are missing")


def _asked_logprobs(step: InFlightStep, token_ids: list[int], vocab_size: int) -> dict[tuple[int, bool], _Asked]:
    """By slot and `is_prompt`."""
    asked = {}
    for seating, token_id in zip(step.sampling, token_ids, strict=True):
        num_top = seating.sequence.request.sampling.num_logprobs
        if num_top is not None:
            asked[seating.slot, False] = _Asked([token_id], min(num_top, vocab_size))
    for chunk in step.chunks:
        if prompt_row_token_ids := chunk.prompt_row_token_ids():
            num_top = chunk.seating.sequence.request.sampling.num_prompt_logprobs
            asked[chunk.seating.slot, True] = _Asked(prompt_row_token_ids, min(num_top or 0, vocab_size))
    return asked


def _check_rows(entry: SequenceLogprobs, asked: _Asked, vocab_size: int) -> None:
    num_rows = len(entry.token_ids)
    if num_rows == 0 or entry.token_ids != asked.token_ids[:num_rows]:
        raise ResultMismatchError(f"logprobs of slot {entry.slot} are about other tokens than its own")
    if entry.num_top != asked.num_top:
        message = f"logprobs of slot {entry.slot} come with {entry.num_top} alternatives of {asked.num_top} asked for"
        raise ResultMismatchError(message)
    if not (
        len(entry.logprobs) == num_rows
        and len(entry.top_token_ids) == len(entry.top_logprobs) == num_rows * entry.num_top
    ):
        raise ResultMismatchError(f"logprobs of slot {entry.slot} have the wrong shape")
    _check_vocabulary(entry.top_token_ids, vocab_size)
