"""Chooses the next token of each sequence.

In this order: logit_bias; allowed and banned tokens; no end token before min_tokens; repetition penalty (over prompt
and answer, as in the CTRL paper and in transformers); frequency and presence penalties (over the answer, as in OpenAI's
API); temperature; top_k; top_p (of what top_k leaves); min_p; the draw. As in vLLM, penalties see biased logits, which
transformers biases last. As in transformers, min_p comes after top_p; vLLM has it before, which differs only where both
are used.

Temperature 0 is greedy: the largest logit after the penalties, of equal ones the lowest id. Else one uniform number, a
function of the seed and of the token's position in the answer, becomes a token by inverse CDF in order of ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everystop.plan import SequenceFailure, SequenceLogprobs
from executor_svc.backend import Seat
from executor_svc.model.sampler_adjust import Adjustments
from executor_svc.model.sampler_draw import draw
from executor_svc.model.sampler_logprobs import prompt_logprobs, sampled_logprobs
from executor_svc.model.sampler_top import select_rows
from executor_svc.random import uniform

__all__ = ["Sampler", "SamplerOutput", "prompt_logprobs"]

_NOT_FINITE = "the model's logits are not finite"
_NOTHING_LEFT = "no token is left to choose: allowed and banned token ids and min_tokens exclude them all"


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What one call of the sampler chose."""

    token_ids: list[int]
    """One for each seat; 0 for one that failed."""
    logprobs: list[SequenceLogprobs]
    """For the seats that ask for them and did not fail, in their order."""
    failures: list[SequenceFailure]
    """In the order of the seats."""


class Sampler:
    """Samples for all seated sequences at once; what one of them gets does not depend on the others."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._adjustments: dict[int, Adjustments] = {}

    @torch.inference_mode()
    def admit(self, seat: Seat) -> None:
        """Takes in a sequence, with the answer that it has so far."""
        self._adjustments[seat.slot] = Adjustments(seat, self._vocab_size, self._device)

    def exit(self, seat: Seat) -> None:
        """Forgets an admitted sequence."""
        del self._adjustments[seat.slot]

    def reset(self) -> None:
        """Forgets all sequences."""
        self._adjustments.clear()

    @torch.inference_mode()
    def sample(self, logits: Tensor, seats: Sequence[Seat]) -> SamplerOutput:
        """Chooses one token for each seat, and counts it in; the caller appends it to the seat afterwards.

        Args:
            logits: [len(seats), vocab_size] of any floating point type; left as they are.
            seats: Admitted ones.
        """
        assert logits.shape == (len(seats), self._vocab_size)
        untouched = [row for row, seat in enumerate(seats) if not self._is_reworked(seat)]
        reworked = [row for row, seat in enumerate(seats) if self._is_reworked(seat)]
        choices: dict[int, int | str] = {}
        if untouched:
            choices.update(zip(untouched, _choose_best(select_rows(logits, untouched)), strict=True))
        if reworked:
            # NOTE: Indexing copies. What follows works in place, and the logits must stay as they are.
            scores = logits[reworked].to(torch.float32)
            choices.update(zip(reworked, self._choose(scores, [seats[row] for row in reworked]), strict=True))
        return self._conclude(logits, seats, [choices[row] for row in range(len(seats))])

    def _is_reworked(self, seat: Seat) -> bool:
        """Whether the token is anything but the largest of the model's own logits."""
        return seat.sampling.temperature > 0 or self._adjustments[seat.slot].apply_at(_position(seat))

    def _choose(self, scores: Tensor, seats: Sequence[Seat]) -> list[int | str]:
        """A token id, or why there is none, for each seat. `scores` [len(seats), vocab], float32, is overwritten."""
        are_finite = scores.amax(-1).isfinite().tolist()
        for row, seat in enumerate(seats):
            adjustments = self._adjustments[seat.slot]
            if are_finite[row] and adjustments.apply_at(_position(seat)):
                adjustments.apply(scores[row], _position(seat))
        choices: list[int | str] = [_NOT_FINITE if not is_finite else _NOTHING_LEFT for is_finite in are_finite]
        are_open = scores.amax(-1).isfinite().tolist()
        greedy = [row for row, seat in enumerate(seats) if are_open[row] and seat.sampling.temperature == 0]
        drawn = [row for row, seat in enumerate(seats) if are_open[row] and seat.sampling.temperature > 0]
        if greedy:
            for row, choice in zip(greedy, _choose_best(select_rows(scores, greedy)), strict=True):
                choices[row] = choice
        if drawn:
            uniforms = [uniform(seats[row].sampling.seed, _position(seats[row])) for row in drawn]
            sampling = [seats[row].sampling for row in drawn]
            for row, choice in zip(drawn, draw(select_rows(scores, drawn), sampling, uniforms), strict=True):
                choices[row] = choice
        return choices

    def _conclude(self, logits: Tensor, seats: Sequence[Seat], choices: Sequence[int | str]) -> SamplerOutput:
        """Counts the tokens in, and looks up the log-probabilities that are asked for."""
        failures = []
        reported = []
        for row, (seat, choice) in enumerate(zip(seats, choices, strict=True)):
            if isinstance(choice, str):
                failures.append(SequenceFailure(slot=seat.slot, reason=choice))
                continue
            self._adjustments[seat.slot].count(choice)
            if seat.sampling.num_logprobs is not None:
                reported.append(row)
        token_ids = [0 if isinstance(choice, str) else choice for choice in choices]
        logprobs = []
        if reported:
            logprobs = sampled_logprobs(
                select_rows(logits, reported), [seats[row] for row in reported], [token_ids[row] for row in reported]
            )
        return SamplerOutput(token_ids, logprobs, failures)


def _position(seat: Seat) -> int:
    """Of the token to be chosen, in the answer."""
    return len(seat.token_ids) - seat.num_prompt_tokens


def _choose_best(scores: Tensor) -> list[int | str]:
    """For each row of `scores` [rows, vocab] the lowest id of the largest, or why there is none."""
    # NOTE: max gives NaN where a row has one, and the first of equal values.
    largest = scores.max(dim=-1)
    return [
        token_id if is_finite else _NOT_FINITE
        for token_id, is_finite in zip(largest.indices.tolist(), largest.values.isfinite().tolist(), strict=True)
    ]
