"""Attention over the paged cache, one sequence after another.

Each sequence gathers exactly the keys and values that it may see, so a result cannot depend on its neighbours, on
padding or on what stands in other blocks.

It must not depend either on how the sequence came this far: token by token, in chunks of any size, or all at once again
after a preemption or a lost executor. But the sums over keys run in another order for another number of rows or keys.
They are therefore made in float64, where the order moves the 16th digit, and rounded to the cache's type once, at the
end, where it no longer shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from everystop_kernels.ops import AttentionShape, PagedAttention, RaggedBatch


@dataclass(frozen=True, slots=True, eq=False)
class _Segment:
    """One sequence's part in a step.

    keys in the gathered blocks   | . . . . | k k k k | k k . . |
                                  0       first           first + num_keys
    """

    start: int
    """First row of the query; the last is end - 1."""
    end: int
    block_ids: Tensor
    """[num_blocks] that hold what any of the rows sees."""
    first: int
    """Tokens of the first of these blocks that no row sees."""
    num_keys: int
    mask: Tensor | None
    """[end - start, num_keys] bool, true where a row sees a key; None for a single row, which sees them all."""


@dataclass(frozen=True, slots=True, eq=False)
class _SequenceLoop:
    shape: AttentionShape
    segments: list[_Segment]

    def __call__(self, query: Tensor, cache: Tensor) -> Tensor:
        output = torch.zeros_like(query)
        for segment in self.segments:
            rows = slice(segment.start, segment.end)
            output[rows] = self._attend(query[rows], cache, segment)
        return output

    def _attend(self, query: Tensor, cache: Tensor, segment: _Segment) -> Tensor:
        shape = self.shape
        gathered = cache.index_select(1, segment.block_ids).flatten(1, 2)
        seen = gathered[:, segment.first : segment.first + segment.num_keys].double()
        keys, values = seen.transpose(1, 2).unsqueeze(1)  # each [1, num_kv_heads, num_keys, head_dim]
        exact_query = query.double()
        if segment.mask is None:
            # The query heads that share keys pass as rows of one head: quicker than enable_gqa, the same result.
            grouped = exact_query.view(1, shape.num_kv_heads, -1, shape.head_dim)
            return functional.scaled_dot_product_attention(grouped, keys, values).view(query.shape)
        heads = exact_query.transpose(0, 1).unsqueeze(0)
        attended = functional.scaled_dot_product_attention(heads, keys, values, attn_mask=segment.mask, enable_gqa=True)
        return attended[0].transpose(0, 1)


def plan_attention(batch: RaggedBatch, shape: AttentionShape) -> PagedAttention:
    """See `ops.PlanAttention`."""
    starts = batch.cu_seqlens_q.tolist()
    seq_lens = batch.seq_lens.tolist()
    segments = [
        _segment(starts[i], starts[i + 1], seq_len, batch.block_tables[i], shape) for i, seq_len in enumerate(seq_lens)
    ]
    return _SequenceLoop(shape, segments)


def _segment(start: int, end: int, seq_len: int, block_table: Tensor, shape: AttentionShape) -> _Segment:
    num_rows = end - start
    first_key = 0 if shape.window is None else max(0, seq_len - num_rows - shape.window + 1)
    first_block = first_key // shape.block_size
    num_keys = seq_len - first_key
    return _Segment(
        start=start,
        end=end,
        block_ids=block_table[first_block : -(-seq_len // shape.block_size)],
        first=first_key - first_block * shape.block_size,
        num_keys=num_keys,
        mask=None if num_rows == 1 else _mask(num_rows, num_keys, shape.window, block_table.device),
    )


def _mask(num_rows: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    # Aligned at the end: the last row sees the last key.
    causal = torch.ones(num_rows, num_keys, dtype=torch.bool, device=device).tril_(num_keys - num_rows)
    return causal if window is None else causal.triu_(num_keys - num_rows - window + 1)
