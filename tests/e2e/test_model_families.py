"""Small random models of every supported kind: the ragged forward against transformers, logit by logit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from everystop.plan import SamplingParams
from everystop.settings import ExecutorConfig
from everystop_kernels.ops import load_ops
from executor_svc.backend import ScheduledSequence, Seat
from executor_svc.model.batch import build_inputs
from executor_svc.model.config import load_config
from executor_svc.model.decoder import Decoder
from executor_svc.model.kv_cache import allocate_cache, plan_cache
from executor_svc.model.weights import load_weights

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    # Ten times the usual: attention that is peaked, so that a wrong rotation or mask shows.
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LONG_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i / 4 for i in range(8)]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 16, **LONG_FACTORS}

CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama-head-dim": LlamaConfig(**SMALL, head_dim=24),
    "llama-rope-llama3": LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama-rope-linear": LlamaConfig(**SMALL, rope_parameters=LINEAR_ROPE),
    "llama-rope-dynamic": LlamaConfig(**SMALL, rope_parameters=DYNAMIC_ROPE),
    "llama-rope-yarn": LlamaConfig(**SMALL, rope_parameters=YARN_ROPE),
    "llama-rope-longrope": LlamaConfig(**SMALL, rope_parameters=LONGROPE),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2-some-windows": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=10, max_window_layers=1),
    "qwen3": Qwen3Config(**SMALL, head_dim=32),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "mistral-window": MistralConfig(**SMALL, sliding_window=10),
}
BLOCK_SIZE = 8


@pytest.fixture(params=CONFIGS, ids=str)
def reference(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        # Fresh biases are zeros and fresh norms are ones, which would hide that they are left out.
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


@torch.inference_mode()
def test_logits_are_those_of_transformers(reference: Any, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path)
    config = load_config(tmp_path)
    limits = plan_cache(config, ExecutorConfig(block_size=BLOCK_SIZE, num_blocks=32), torch.float32)
    decoder = Decoder(
        config,
        load_weights(tmp_path, config, torch.float32),
        load_ops("torch"),
        max_model_len=limits.max_model_len,
        block_size=BLOCK_SIZE,
    )
    caches = allocate_cache(config, limits, torch.float32)
    # All longer than the windows and than what longrope was trained on, whose factors are chosen by the length.
    prompts = [torch.arange(3, 3 + num).mul(7).remainder(97).tolist() for num in (23, 41, 18)]
    blocks = iter(reversed(range(32)))
    seats = [
        Seat(slot, f"request-{slot}", 1, prompt, len(prompt), 0, [next(blocks) for _ in range(6)], SamplingParams())
        for slot, prompt in enumerate(prompts)
    ]
    logits: list[list[torch.Tensor]] = [[] for _ in seats]
    # Whole prompts, parts of them, and the last token alone, as a decode comes.
    for chunks in ([17, 0, 17], [5, 33, 1], [1, 8, 0]):
        scheduled = [ScheduledSequence(seat, num, False) for seat, num in zip(seats, chunks, strict=True) if num]
        rows = decoder.logits(decoder.forward(build_inputs(scheduled, BLOCK_SIZE), caches))
        start = 0
        for entry in scheduled:
            logits[entry.seat.slot].append(rows[start : start + entry.num_tokens])
            entry.seat.num_computed_tokens += entry.num_tokens
            start += entry.num_tokens
    for seat, parts in zip(seats, logits, strict=True):
        expected = reference(torch.tensor([seat.token_ids])).logits[0]
        torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-4)
