"""Paged attention of every implementation against the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from everystop_kernels import reference
from everystop_kernels.ops import AttentionShape, Ops, RaggedBatch, load_ops

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
NUM_BLOCKS = 64

MIXED = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 100), (4, 4), (6, 40), (3, 90), (17, 17)]
"""(rows, tokens after the step) of sequences: first tokens, decodes on both sides of a block's end, prompts, chunks."""


@pytest.fixture(params=["torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    name: str = request.param
    return load_ops(name)


def make_batch(sequences: Sequence[tuple[int, int]], block_size: int) -> RaggedBatch:
    """Blocks in random order, no block shared; the rest of each block table points at a block that nobody may read."""
    generator = torch.Generator().manual_seed(0)
    free = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
    nums = [-(-seq_len // block_size) for _, seq_len in sequences]
    tables = torch.zeros(len(sequences), max(nums, default=0) + 2, dtype=torch.int64)
    for table, num in zip(tables, nums, strict=True):
        table[:num] = torch.tensor([free.pop() for _ in range(num)])
    starts = [0]
    slots = []
    for (num_rows, seq_len), table in zip(sequences, tables, strict=True):
        starts.append(starts[-1] + num_rows)
        slots += [int(table[i // block_size]) * block_size + i % block_size for i in range(seq_len - num_rows, seq_len)]
    return RaggedBatch(
        num_tokens=starts[-1],
        cu_seqlens_q=torch.tensor(starts),
        seq_lens=torch.tensor([seq_len for _, seq_len in sequences], dtype=torch.int64),
        block_tables=tables,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )


def make_cache(batch: RaggedBatch, shape: AttentionShape, dtype: torch.dtype) -> torch.Tensor:
    """Random where a sequence has tokens, NaN everywhere else."""
    size = (2, NUM_BLOCKS * shape.block_size, shape.num_kv_heads, shape.head_dim)
    filled = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    cache = torch.full_like(filled, torch.nan)
    for table, seq_len in zip(batch.block_tables, batch.seq_lens.tolist(), strict=True):
        slots = [int(table[i // shape.block_size]) * shape.block_size + i % shape.block_size for i in range(seq_len)]
        cache[:, slots] = filled[:, slots]
    return cache.view(2, NUM_BLOCKS, shape.block_size, shape.num_kv_heads, shape.head_dim)


def make_query(batch: RaggedBatch, shape: AttentionShape, dtype: torch.dtype, num_padding: int = 0) -> torch.Tensor:
    size = (batch.num_tokens + num_padding, shape.num_heads, shape.head_dim)
    return torch.randn(size, generator=torch.Generator().manual_seed(2)).to(dtype)


def check(
    ops: Ops, sequences: Sequence[tuple[int, int]], shape: AttentionShape, dtype: torch.dtype = torch.float32
) -> None:
    batch = make_batch(sequences, shape.block_size)
    cache, query = make_cache(batch, shape, dtype), make_query(batch, shape, dtype)
    actual = ops.plan_attention(batch, shape)(query, cache)
    assert actual.dtype is dtype
    torch.testing.assert_close(
        actual.double(),
        reference.paged_attention(query, cache, batch, shape),
        rtol=TOLERANCES[dtype],
        atol=TOLERANCES[dtype],
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("group", [1, 4, 5, 7, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_groups_of_query_heads(ops: Ops, dtype: torch.dtype, group: int, num_kv_heads: int) -> None:
    check(ops, MIXED, AttentionShape(num_kv_heads * group, num_kv_heads, 16, 16, window=None), dtype)


@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 128])
def test_head_sizes(ops: Ops, head_dim: int) -> None:
    check(ops, MIXED, AttentionShape(6, 2, head_dim, 16, window=None))


@pytest.mark.parametrize("block_size", [1, 3, 8, 32, 128])
def test_block_sizes(ops: Ops, block_size: int) -> None:
    sequences = MIXED if block_size > 3 else [(1, 1), (1, 4), (5, 7), (9, 9)]
    check(ops, sequences, AttentionShape(6, 2, 16, block_size, window=None))


@pytest.mark.parametrize("window", [1, 2, 16, 20, 33, 1000])
def test_windows(ops: Ops, window: int) -> None:
    check(ops, MIXED, AttentionShape(6, 2, 16, 16, window))


def test_a_batch_without_sequences(ops: Ops) -> None:
    check(ops, [], AttentionShape(6, 2, 16, 16, window=None))


def test_padding_rows_come_out_as_zeros(ops: Ops) -> None:
    shape = AttentionShape(6, 2, 16, 16, window=None)
    batch = make_batch([(1, 20), (3, 5)], shape.block_size)
    query = make_query(batch, shape, torch.float32, num_padding=4)
    query[batch.num_tokens :] = torch.nan
    output = ops.plan_attention(batch, shape)(query, make_cache(batch, shape, torch.float32))
    assert output[: batch.num_tokens].isfinite().all()
    assert (output[batch.num_tokens :] == 0).all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("window", [None, 24])
def test_a_sequence_gets_the_same_bits_alone_and_among_others(ops: Ops, dtype: torch.dtype, window: int | None) -> None:
    shape = AttentionShape(9, 3, 64, 16, window)
    together = make_batch(MIXED, shape.block_size)
    cache, query = make_cache(together, shape, dtype), make_query(together, shape, dtype)
    output = ops.plan_attention(together, shape)(query, cache)
    starts = together.cu_seqlens_q.tolist()
    for i, (num_rows, seq_len) in enumerate(MIXED):
        rows = slice(starts[i], starts[i + 1])
        alone = RaggedBatch(
            num_tokens=num_rows,
            cu_seqlens_q=torch.tensor([0, num_rows]),
            seq_lens=torch.tensor([seq_len]),
            block_tables=together.block_tables[i : i + 1],
            slot_mapping=together.slot_mapping[rows],
        )
        assert torch.equal(ops.plan_attention(alone, shape)(query[rows], cache), output[rows])
