"""The size of the KV cache, and the lengths that it allows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from everystop.errors import ServiceError
from everystop.settings import ExecutorConfig
from executor_svc.model import kv_cache
from executor_svc.model.config import ModelConfig
from executor_svc.model.kv_cache import CacheGeometry, allocate_cache, plan_cache
from executor_svc.model.rope import Rope

MODEL = ModelConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    has_qkv_bias=False,
    has_output_bias=False,
    has_mlp_bias=False,
    has_qk_norm=False,
    has_tied_head=True,
    windows=(None, None),
    rope=Rope(lambda _: (torch.ones(4), 1.0), max_positions=4096),
    max_position_embeddings=1024,
    eos_token_ids=(2,),
)
BLOCK_BYTES = 2 * 2 * 16 * 2 * 8 * 4  # keys and values, layers, tokens, heads, head_dim, float32


def plan(model: ModelConfig = MODEL, dtype: torch.dtype = torch.float32, **settings: object) -> CacheGeometry:
    return plan_cache(model, ExecutorConfig(**settings), dtype)  # type: ignore[arg-type]  # each test names its own


def test_the_memory_limit_is_filled_with_blocks() -> None:
    geometry = plan(kv_cache_gib=0.001)
    assert geometry.block_bytes == BLOCK_BYTES
    assert geometry.num_blocks == int(0.001 * 2**30) // BLOCK_BYTES
    assert geometry.num_bytes == geometry.num_blocks * BLOCK_BYTES


def test_half_the_bytes_a_number_give_twice_the_blocks() -> None:
    assert plan(dtype=torch.bfloat16).num_blocks == 2 * plan(dtype=torch.float32).num_blocks


def test_a_number_of_blocks_overrides_the_memory_limit() -> None:
    assert plan(kv_cache_gib=0.001, num_blocks=7).num_blocks == 7


def test_a_length_left_out_is_the_models_own_when_it_fits() -> None:
    assert plan(num_blocks=1024 // 16).max_model_len == 1024


def test_a_length_left_out_shrinks_to_what_fits() -> None:
    assert plan(num_blocks=10).max_model_len == 160


def test_a_length_that_fits_exactly_is_taken() -> None:
    assert plan(num_blocks=10, max_model_len=160).max_model_len == 160


def test_a_stretched_model_takes_more_than_it_was_trained_on() -> None:
    assert plan(num_blocks=1000, max_model_len=4096).max_model_len == 4096


def test_a_length_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(ServiceError) as caught:
        plan(num_blocks=10, max_model_len=161)
    assert caught.value.field == "max_model_len"
    assert caught.value.message == (
        f"max_model_len: 161 tokens need 11 KV blocks ({11 * BLOCK_BYTES} bytes); "
        f"10 blocks ({10 * BLOCK_BYTES} bytes) are available; the largest max_model_len that fits is 160"
    )


def test_a_length_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(ServiceError, match="5000 is more than the model's 4096 positions; at most 160"):
        plan(num_blocks=10, max_model_len=5000)


def test_a_limit_too_small_for_one_block_is_refused() -> None:
    with pytest.raises(ServiceError, match=f"hold no block of 16 tokens; one needs {BLOCK_BYTES * 1000} bytes"):
        plan(replace(MODEL, num_layers=2000), kv_cache_gib=0.001)


def test_the_cache_is_one_tensor_for_each_layer() -> None:
    caches = allocate_cache(MODEL, plan(num_blocks=5), torch.bfloat16)
    assert [(cache.shape, cache.dtype) for cache in caches] == [((2, 5, 16, 2, 8), torch.bfloat16)] * 2


def test_a_cache_larger_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory_bytes", lambda: 3 * BLOCK_BYTES)
    with pytest.raises(ServiceError, match=rf"needs {4 * BLOCK_BYTES} bytes .*{3 * BLOCK_BYTES} bytes .*3 blocks"):
        allocate_cache(MODEL, plan(num_blocks=4), torch.float32)


def test_free_memory_is_known_and_plausible() -> None:
    available_bytes = kv_cache.available_memory_bytes()
    assert available_bytes is not None
    assert 2**20 < available_bytes < 2**50
