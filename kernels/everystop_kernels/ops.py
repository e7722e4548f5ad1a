"""The seam between the decoder and the kernels: what each operation does, and where implementations are found.

A faster implementation is a new subpackage that fills in `Ops`, and a line in `_IMPLEMENTATIONS`; the decoder stays as
it is.

The KV cache of one layer is one tensor [2, num_blocks, block_size, num_kv_heads, head_dim]: keys, then values. Token i
of a sequence lives in block `block_table[i // block_size]` at offset `i % block_size`. Blocks that belong to no
sequence may hold anything, NaN too.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

_IMPLEMENTATIONS = {"torch": "everystop_kernels.torch_ops"}
"""Name to the module that has it as `OPS`. Imported when asked for: some need a compiler or a GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class RaggedBatch:
    """Where the tokens of one step belong: sequence after sequence in one flat row of tokens, without padding between.

    tokens   | s0 s0 s0 | s1 | s2 s2 | . . |      the rows from num_tokens on are padding and belong to nobody
             0          3    4       6     8      cu_seqlens_q = [0, 3, 4, 6]
    """

    num_tokens: int
    cu_seqlens_q: Tensor
    """[num_seqs + 1] int64: rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] are of sequence i; never empty."""
    seq_lens: Tensor
    """[num_seqs] int64: tokens in the cache after this step; the rows of a sequence are the last ones of these."""
    block_tables: Tensor
    """[num_seqs, max_num_blocks] int64; entries past a sequence's length are padding, to be read by nobody."""
    slot_mapping: Tensor
    """[num_tokens] int64: where the keys and values of each row go: block id * block_size + offset."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all steps of a layer have in common."""

    num_heads: int
    num_kv_heads: int
    """Divides num_heads; query head h attends to key head h // (num_heads // num_kv_heads)."""
    head_dim: int
    block_size: int
    window: int | None
    """A token sees this many tokens up to and including itself; None: all."""


class RmsNorm(Protocol):
    """Root mean square norm."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / rms(x) * weight` over the last dimension, computed in float32. x: [..., size], weight: [size]."""
        ...


class Rotary(Protocol):
    """Rotary position embedding."""

    def __call__(self, x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
        """Rotate element i of each head with element i + head_dim / 2.

        x: [num_rows, num_heads, head_dim]. cos, signed_sin: [num_rows, head_dim]; cos has its first half twice,
        signed_sin the negated sine, then the sine, so that the result is `x * cos + swap_halves(x) * signed_sin`.
        """
        ...


class SiluAndMul(Protocol):
    """The gated activation of the feed-forward layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """`silu(gate) * up`. x: [num_rows, 2 * size], gate then up; returns [num_rows, size]."""
        ...


class Linear(Protocol):
    """Matrix product with weights."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`. x: [num_rows, in_features], weight: [out_features, in_features]."""
        ...


class WriteKv(Protocol):
    """Keys and values into the paged cache."""

    def __call__(self, cache: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Put the first num_tokens rows into the cache of one layer.

        keys, values: [num_rows, num_kv_heads, head_dim]; slot_mapping: [num_tokens], see `RaggedBatch`.
        """
        ...


class PagedAttention(Protocol):
    """Attention of one planned step; called once for every layer."""

    def __call__(self, query: Tensor, cache: Tensor) -> Tensor:
        """Causal softmax attention, scaled by head_dim ** -0.5; the step's keys and values are already in the cache.

        query: [num_rows, num_heads, head_dim] with num_rows >= num_tokens; returns the same shape, zeros in padding
        rows. The result of a sequence does not depend on the other sequences.
        """
        ...


class PlanAttention(Protocol):
    """Prepares attention for one step."""

    def __call__(self, batch: RaggedBatch, shape: AttentionShape) -> PagedAttention:
        """Do once for a step what all its layers share."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of every operation."""

    rms_norm: RmsNorm
    rotary: Rotary
    silu_and_mul: SiluAndMul
    linear: Linear
    write_kv: WriteKv
    plan_attention: PlanAttention


def load_ops(name: str) -> Ops:
    """The implementation called `name`; KeyError if there is none."""
    ops = importlib.import_module(_IMPLEMENTATIONS[name]).OPS
    assert isinstance(ops, Ops)
    return ops
