"""From plain lists to tensors: the one place where the tensors of a step are born."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from everystop_kernels.ops import RaggedBatch
from torch import Tensor

from executor_svc.backend import ScheduledSequence

ROW_MULTIPLE = 8
"""Rows of every matrix product come in multiples of this.

The matrix libraries have kernels of their own for one, two or three rows, and for what is left over, which add up in
another order. With whole multiples a row's result is the same bits whichever rows are beside it.
"""


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """One step for the decoder. Rows from `ragged.num_tokens` on are padding."""

    token_ids: Tensor
    """[num_rows] int64."""
    positions: Tensor
    """[num_rows] int64."""
    ragged: RaggedBatch


def build_inputs(scheduled: Sequence[ScheduledSequence], block_size: int) -> ModelInputs:
    """Lay the scheduled tokens out, sequence after sequence. `scheduled` is not empty."""
    num_queries = [entry.num_tokens for entry in scheduled]
    first_positions = [entry.seat.num_computed_tokens for entry in scheduled]
    seq_lens = [first + num for first, num in zip(first_positions, num_queries, strict=True)]
    starts = [0, *accumulate(num_queries)]
    num_tokens = starts[-1]
    num_rows = round_up(num_tokens)

    token_ids = torch.zeros(num_rows, dtype=torch.int64)
    token_ids[:num_tokens] = torch.tensor(
        list(
            chain.from_iterable(
                entry.seat.token_ids[first:end]
                for entry, first, end in zip(scheduled, first_positions, seq_lens, strict=True)
            )
        )
    )
    cu_seqlens_q = torch.tensor(starts)
    sequence_of_row = torch.repeat_interleave(torch.arange(len(scheduled)), torch.tensor(num_queries))
    shift = torch.tensor(first_positions) - cu_seqlens_q[:-1]
    positions = torch.zeros(num_rows, dtype=torch.int64)
    positions[:num_tokens] = torch.arange(num_tokens) + shift[sequence_of_row]
    block_tables = _block_tables(scheduled, seq_lens, block_size)
    return ModelInputs(
        token_ids,
        positions,
        RaggedBatch(
            num_tokens=num_tokens,
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=torch.tensor(seq_lens),
            block_tables=block_tables,
            slot_mapping=_slots(block_tables, sequence_of_row, positions[:num_tokens], block_size),
        ),
    )


def select_rows(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows of `hidden`, the last repeated up to a whole multiple. `rows` is not empty."""
    padding = round_up(len(rows)) - len(rows)
    return hidden[torch.tensor([*rows, *[rows[-1]] * padding])]


def round_up(num_rows: int) -> int:
    """The next multiple of `ROW_MULTIPLE`."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _block_tables(scheduled: Sequence[ScheduledSequence], seq_lens: Sequence[int], block_size: int) -> Tensor:
    nums = [-(-seq_len // block_size) for seq_len in seq_lens]
    tables = torch.zeros(len(scheduled), max(nums), dtype=torch.int64)
    for table, entry, num in zip(tables, scheduled, nums, strict=True):
        table[:num] = torch.tensor(entry.seat.block_ids[:num])
    return tables


def _slots(block_tables: Tensor, sequence_of_row: Tensor, positions: Tensor, block_size: int) -> Tensor:
    return block_tables[sequence_of_row, positions // block_size] * block_size + positions % block_size
