"""From a result to what it brings the requests."""

from __future__ import annotations

from everystop.plan import SequenceLogprobs, StepResult
from scheduler_svc.core.request import Finish, FinishReason, Output
from scheduler_svc.core.roster import Roster
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import InFlightStep


def take_result(step: InFlightStep, result: StepResult, roster: Roster, now: float) -> list[Output]:
    """Count a checked result in and end whom it ends; at most one output for each request.

    What belongs to an attempt that is over, because of its end, a preemption or a failure in this very step, is
    dropped.
    """
    outputs = _take_failures(step, result, roster)
    for chunk in step.chunks:
        chunk.seating.sequence.take_chunk(chunk.start + chunk.num_tokens)
    prompt_logprobs = _take_prompt_logprobs(step, result)
    sampled_logprobs = {entry.slot: entry for entry in result.logprobs if not entry.is_prompt}
    for seating, token_id in zip(step.sampling, result.token_ids, strict=True):
        if seating.is_current:
            sequence = seating.sequence
            output = Output(
                sequence.request,
                [token_id],
                logprobs=sampled_logprobs.get(seating.slot),
                prompt_logprobs=prompt_logprobs.pop(sequence, []),
                finish=_take_token(sequence, token_id, roster, now),
            )
            outputs.append(output)
    # Those are left that have a part of their prompt still to compute.
    outputs += [Output(sequence.request, [], prompt_logprobs=rows) for sequence, rows in prompt_logprobs.items()]
    return outputs


def fail(sequence: Sequence, message: str, roster: Roster) -> Output:
    """End a request that can't be computed."""
    roster.end(sequence)
    return Output(sequence.request, [], finish=Finish(FinishReason.FAILED, sequence.stats(), message=message))


def _take_failures(step: InFlightStep, result: StepResult, roster: Roster) -> list[Output]:
    if not result.failures:
        return []
    seatings = {seating.slot: seating for seating in step.participants()}
    failures = [(seatings[failure.slot], failure.reason) for failure in result.failures]
    return [fail(seating.sequence, reason, roster) for seating, reason in failures if seating.is_current]


def _take_prompt_logprobs(step: InFlightStep, result: StepResult) -> dict[Sequence, list[SequenceLogprobs]]:
    """What is new in them; a request that has computed a part of its prompt before got that part's rows then."""
    prompt_logprobs: dict[Sequence, list[SequenceLogprobs]] = {}
    if not result.logprobs:
        return prompt_logprobs
    seatings = {chunk.seating.slot: chunk.seating for chunk in step.chunks}
    next_rows = {chunk.seating.slot: chunk.start for chunk in step.chunks}
    for entry in result.logprobs:
        if entry.is_prompt and seatings[entry.slot].is_current:
            sequence = seatings[entry.slot].sequence
            rows = sequence.take_prompt_logprobs(next_rows[entry.slot], entry)
            next_rows[entry.slot] += len(entry.token_ids)
            if rows is not None:
                prompt_logprobs.setdefault(sequence, []).append(rows)
    return prompt_logprobs


def _take_token(sequence: Sequence, token_id: int, roster: Roster, now: float) -> Finish | None:
    roster.counters.num_output_tokens += 1
    reason = sequence.take_token(token_id, now)
    if reason is None:
        return None
    roster.end(sequence)
    return Finish(reason, sequence.stats(), token_id=None if reason is FinishReason.LENGTH else token_id)
