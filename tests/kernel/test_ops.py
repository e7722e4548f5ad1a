"""Every implementation of the plain operations against the oracle."""

from __future__ import annotations

import pytest
import torch

from everystop_kernels import reference
from everystop_kernels.ops import Ops, load_ops

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(params=["torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    name: str = request.param
    return load_ops(name)


@pytest.fixture(params=TOLERANCES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (7, 576), (5, 3, 40)])
def test_rms_norm(ops: Ops, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    # Small values, so that eps matters.
    x, weight = random(*shape, dtype=dtype) * 1e-3, random(shape[-1], dtype=dtype, seed=1)
    assert_near(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(("num_rows", "num_heads", "head_dim"), [(0, 3, 16), (1, 1, 2), (9, 12, 64), (4, 5, 80)])
def test_rotary(ops: Ops, dtype: torch.dtype, num_rows: int, num_heads: int, head_dim: int) -> None:
    angles = random(num_rows, head_dim // 2, dtype=torch.float32) * 3
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    signed_sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    # Not contiguous: heads are a slice of the fused projection.
    x = random(num_rows, num_heads + 2, head_dim, dtype=dtype, seed=1)[:, 1:-1]
    assert_near(ops.rotary(x, cos, signed_sin), reference.rotary(x, cos, signed_sin))


@pytest.mark.parametrize(("num_rows", "size"), [(0, 8), (1, 1), (13, 96)])
def test_silu_and_mul(ops: Ops, dtype: torch.dtype, num_rows: int, size: int) -> None:
    x = random(num_rows, 2 * size, dtype=dtype) * 4
    kept = x.clone()
    assert_near(ops.silu_and_mul(x), reference.silu_and_mul(x))
    assert torch.equal(x, kept)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "in_features", "out_features"), [(0, 4, 4), (1, 64, 48), (17, 33, 5)])
def test_linear(
    ops: Ops, dtype: torch.dtype, has_bias: bool, num_rows: int, in_features: int, out_features: int
) -> None:
    x = random(num_rows, in_features, dtype=dtype)
    weight = random(out_features, in_features, dtype=dtype, seed=1) * in_features**-0.5
    bias = random(out_features, dtype=dtype, seed=2) if has_bias else None
    assert_near(ops.linear(x, weight, bias), reference.linear(x, weight, bias))


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_write_kv_puts_tokens_where_they_belong_and_touches_nothing_else(
    ops: Ops, dtype: torch.dtype, num_tokens: int
) -> None:
    num_blocks, block_size, num_kv_heads, head_dim = 5, 4, 3, 8
    cache = random(2, num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype)
    expected = cache.clone()
    # Two rows more than there are tokens: padding, which must go nowhere.
    keys, values = (random(num_tokens + 2, num_kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(3))[:num_tokens]
    ops.write_kv(cache, keys, values, slots)
    reference.write_kv(expected, keys, values, slots)
    assert torch.equal(cache, expected)


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(KeyError, match="abacus"):
        load_ops("abacus")
