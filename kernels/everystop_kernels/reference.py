"""The oracle: each operation as plainly as it can be written, in float64, token by token and head by head.

Slow on purpose. Every implementation of `ops` is tested against these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everystop_kernels.ops import AttentionShape, RaggedBatch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.RmsNorm`."""
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """See `ops.Rotary`: each pair (i, i + half) is a complex number, turned by its angle."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double())
    turns = torch.complex(cos[:, :half].double(), signed_sin[:, half:].double())
    turned = pairs * turns[:, None, :]
    return torch.cat((turned.real, turned.imag), dim=-1)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `ops.SiluAndMul`."""
    gate, up = x.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.Linear`."""
    product = (x.double()[:, None, :] * weight.double()[None, :, :]).sum(-1)
    return product if bias is None else product + bias.double()


def write_kv(cache: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """See `ops.WriteKv`."""
    block_size = cache.shape[2]
    for row, slot in enumerate(slot_mapping.tolist()):
        cache[0, slot // block_size, slot % block_size] = keys[row]
        cache[1, slot // block_size, slot % block_size] = values[row]


def paged_attention(query: Tensor, cache: Tensor, batch: RaggedBatch, shape: AttentionShape) -> Tensor:
    """See `ops.PagedAttention`."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    group = shape.num_heads // shape.num_kv_heads
    starts = batch.cu_seqlens_q.tolist()
    for sequence, seq_len in enumerate(batch.seq_lens.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        for row in range(start, end):
            position = seq_len - (end - row)
            first = 0 if shape.window is None else max(0, position - shape.window + 1)
            seen = range(first, position + 1)
            blocks = [int(batch.block_tables[sequence, i // shape.block_size]) for i in seen]
            offsets = [i % shape.block_size for i in seen]
            keys, values = cache[:, blocks, offsets].double()
            for head in range(shape.num_heads):
                scores = keys[:, head // group] @ query[row, head].double() * shape.head_dim**-0.5
                output[row, head] = torch.softmax(scores, dim=0) @ values[:, head // group]
    return output
