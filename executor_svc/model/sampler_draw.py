"""Temperature, top_k, top_p, min_p, and the draw: one uniform number becomes a token by inverse CDF, in order of ids.

Every filter keeps a prefix of the ranking, so a row is ranked only until it keeps no more; the best 128 tokens do for
most steps. What a row gets depends neither on how far it was ranked nor on the rows beside it: all sums run along one
row, in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from everystop.plan import SamplingParams
from executor_svc.model.sampler_top import select_rows, top

# How far a filtered row is ranked at first, and then; after that, wholly. 32 rows of 49,152 on two threads: the top 128
# cost 1.5 ms, the top 2,048 cost 7 ms, a full sort 60 ms.
PREFIX_WIDTHS = (128, 2048)

# NOTE: What is smaller still may be flushed to zero, and 0 / 0 is not a number.
_MIN_TEMPERATURE = torch.finfo(torch.float32).tiny


def draw(
    logits: Tensor,
    sampling: Sequence[SamplingParams],
    uniforms: Sequence[float],
    prefix_widths: Sequence[int] = PREFIX_WIDTHS,
) -> list[int]:
    """One token for each row, each of non-zero probability.

    Args:
        logits: [rows, vocab], float32; overwritten. The largest of each row is finite.
        sampling: One for each row; the temperature is above 0.
        uniforms: One for each row, in [0, 1).
        prefix_widths: Ascending; changes what the draw costs, not what it gives.
    """
    vocab_size = logits.shape[-1]
    filters = [_Filter.of(params, vocab_size) for params in sampling]
    points = _column(uniforms, torch.float64, logits.device)
    temperatures = [max(params.temperature, _MIN_TEMPERATURE) for params in sampling]
    # The maximum comes off first: divided by a small temperature it would overflow, and here it becomes an exact 0.
    scaled = logits.sub_(logits.amax(-1, keepdim=True)).div_(_column(temperatures, torch.float32, logits.device))
    probabilities = scaled.softmax(-1)

    drawn: dict[int, int] = {}
    unfiltered = [row for row, row_filter in enumerate(filters) if row_filter.is_off]
    if unfiltered:
        token_ids = _inverse_cdf(select_rows(probabilities, unfiltered), points[unfiltered])
        drawn.update(zip(unfiltered, token_ids.flatten().tolist(), strict=True))
    for width in (*(width for width in prefix_widths if width < vocab_size), vocab_size):
        # One with top_k waits until the ranking is wide enough for it.
        group = [
            row
            for row, row_filter in enumerate(filters)
            if row not in drawn and (row_filter.top_k <= width or row_filter.top_k == vocab_size)
        ]
        if group:
            ranked = _draw_ranked(
                select_rows(scaled, group),
                select_rows(probabilities, group),
                [filters[row] for row in group],
                points[group],
                width,
            )
            drawn.update((row, token) for row, token in zip(group, ranked, strict=True) if token is not None)
    return [drawn[row] for row in range(len(filters))]


@dataclass(frozen=True, slots=True)
class _Filter:
    """top_k, top_p and min_p of one row; one that is off has the value that keeps all."""

    top_k: int
    """1 to vocab."""
    top_p: float
    min_scaled: float
    """Logarithm of min_p: a bound on logits whose maximum is 0."""
    is_off: bool

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> _Filter:
        top_k = min(params.top_k or vocab_size, vocab_size)
        return cls(
            top_k=top_k,
            top_p=params.top_p if params.top_p < 1 else math.inf,
            min_scaled=math.log(params.min_p) if params.min_p > 0 else -math.inf,
            is_off=top_k == vocab_size and params.top_p >= 1 and params.min_p <= 0,
        )


def _draw_ranked(
    scaled: Tensor, probabilities: Tensor, filters: Sequence[_Filter], uniforms: Tensor, width: int
) -> list[int | None]:
    """Draws among the best `width` tokens of each row; None where others may pass the filters, too.

    Args:
        scaled: [rows, vocab], logits over temperature whose maximum is 0.
        probabilities: [rows, vocab]
        filters: One for each row.
        uniforms: [rows, 1]
        width: 1 to vocab.
    """
    values, ids = top(scaled, width)
    weights = probabilities.gather(-1, ids)
    keep = _keep(filters, values, weights, scaled.shape[-1])
    num_kept = int(keep.sum(-1).amax())
    ids, by_id = ids[:, :num_kept].sort(dim=-1)
    token_ids = ids.gather(-1, _inverse_cdf((weights * keep)[:, :num_kept].gather(-1, by_id), uniforms))
    return [
        token_id if row_filter.top_k <= width or not keeps_last else None
        for row_filter, token_id, keeps_last in zip(
            filters, token_ids.flatten().tolist(), keep[:, -1].tolist(), strict=True
        )
    ]


def _keep(filters: Sequence[_Filter], values: Tensor, weights: Tensor, vocab_size: int) -> Tensor:
    """Which of the best tokens pass; in each row a prefix, never empty.

    Args:
        filters: One for each row.
        values: [rows, width] scaled logits, best first.
        weights: [rows, width], their probabilities among all tokens.
        vocab_size: What top_k is when it is off.

    Returns:
        [rows, width], bool.
    """
    width = values.shape[-1]
    top_k = _column([row_filter.top_k for row_filter in filters], torch.int64, values.device)
    top_p = _column([row_filter.top_p for row_filter in filters], torch.float64, values.device)
    min_scaled = _column([row_filter.min_scaled for row_filter in filters], torch.float32, values.device)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # top_p is a share of what top_k leaves. Without top_k that is 1, whatever the width and the rounding of the sum.
    mass = cumulative.gather(-1, top_k.clamp(max=width) - 1).masked_fill_(top_k == vocab_size, 1.0)
    within_top_k = torch.arange(width, device=values.device) < top_k
    # A token passes when those before it fall short of top_p.
    within_top_p = pad(cumulative[:, :-1], (1, 0)) < top_p * mass
    return within_top_k & within_top_p & (values >= min_scaled)


def _inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds the uniform share of the sum.

    The sum is in float64, as in float32 the tail of a large vocabulary is lost. For every u up to 1 - 2**-53 the
    product u * sum rounds to less than the sum, so that there always is such an index; the cumulative weight rises
    there, so that its weight is above 0.

    Args:
        weights: [rows, width], float32, with a positive sum.
        uniforms: [rows, 1], float64.

    Returns:
        [rows, 1], int64.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)


def _column(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, 1]."""
    return torch.tensor(numbers, dtype=dtype, device=device).unsqueeze(-1)
