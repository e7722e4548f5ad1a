"""From plain lists to tensors: the one place where the tensors of a step are born."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everystop_kernels.ops import RaggedBatch
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
    # In numpy, where a small operation costs a tenth of what it does in torch: none here is large.
    firsts = np.array([entry.seat.num_computed_tokens for entry in scheduled])
    num_queries = np.array([entry.num_tokens for entry in scheduled])
    seq_lens = firsts + num_queries
    starts = np.concatenate(([0], num_queries.cumsum()))
    num_tokens = int(starts[-1])
    num_rows = round_up(num_tokens)

    sequence_of_row = np.arange(len(scheduled)).repeat(num_queries)
    positions = np.zeros(num_rows, dtype=np.int64)
    positions[:num_tokens] = np.arange(num_tokens) + (firsts - starts[:-1])[sequence_of_row]
    token_ids = np.zeros(num_rows, dtype=np.int64)
    for entry, first, end, row in zip(scheduled, firsts, seq_lens, starts, strict=False):
        token_ids[row : row + end - first] = entry.seat.token_ids[first:end]
    block_tables = _block_tables(scheduled, -(-seq_lens // block_size))
    blocks, offsets = np.divmod(positions[:num_tokens], block_size)
    return ModelInputs(
        torch.from_numpy(token_ids),
        torch.from_numpy(positions),
        RaggedBatch(
            num_tokens=num_tokens,
            cu_seqlens_q=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            block_tables=torch.from_numpy(block_tables),
            slot_mapping=torch.from_numpy(block_tables[sequence_of_row, blocks] * block_size + offsets),
        ),
    )


def select_rows(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows of `hidden`, the last repeated up to a whole multiple. `rows` is not empty."""
    padding = round_up(len(rows)) - len(rows)
    return hidden[torch.tensor([*rows, *[rows[-1]] * padding])]


def round_up(num_rows: int) -> int:
    """The next multiple of `ROW_MULTIPLE`."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _block_tables(scheduled: Sequence[ScheduledSequence], num_blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    tables = np.zeros((len(scheduled), num_blocks.max()), dtype=np.int64)
    for table, entry, num in zip(tables, scheduled, num_blocks, strict=True):
        table[:num] = entry.seat.block_ids[:num]
    return tables
