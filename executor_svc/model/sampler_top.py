"""Rows and their best: an exact ranking in which lower ids win among equals."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def top(scores: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """The `num_top` best of each row and their ids, best first, lower ids first among equals.

    A shorter ranking is a prefix of a longer one. `torch.topk` alone does not promise it: of equal values, which are
    common in bfloat16, it takes any, in any order.

    Args:
        scores: [rows, vocab]
        num_top: 1 to vocab

    Returns:
        Values [rows, num_top] and ids [rows, num_top] (int64).
    """
    if num_top == scores.shape[-1]:
        ranked = scores.sort(dim=-1, descending=True, stable=True)
        return ranked.values, ranked.indices
    values, ids = scores.topk(num_top, dim=-1)
    edge = values[:, -1:]
    num_tied = (scores == edge).sum(-1)
    num_taken = (values == edge).sum(-1)
    for row in (num_tied > num_taken).nonzero().flatten().tolist():
        lowest = (scores[row] == edge[row]).nonzero().flatten()
        ids[row, num_top - num_taken[row] :] = lowest[: num_taken[row]]
    # Two stable sorts, the less significant key first. The values of equals are equal, so they stay where they are.
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def select_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """`values[rows]`, [len(rows), vocab]; ascending `rows` that name all of them cost no copy."""
    return values if len(rows) == len(values) else values[list(rows)]
