"""What the forward needs to know of a model: Hugging Face's config.json, checked and reduced to that."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everystop.errors import invalid
from executor_svc.model.rope import Rope, load_rope


@dataclass(frozen=True, slots=True, eq=False)
class ModelConfig:
    """A Llama-family decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    has_qkv_bias: bool
    has_output_bias: bool
    """Of the attention's output projection."""
    has_mlp_bias: bool
    has_qk_norm: bool
    """Queries and keys are normed, head by head, before they are rotated."""
    has_tied_head: bool
    """The output head is the embedding."""
    windows: tuple[int | None, ...]
    """For each layer: how many tokens a token sees, itself included; None: all."""
    rope: Rope
    max_position_embeddings: int
    """Tokens that the model was trained on."""
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes, as functions of its config."""

    has_qkv_bias: Callable[[Any], bool]
    has_output_bias: Callable[[Any], bool]
    has_mlp_bias: Callable[[Any], bool]
    has_qk_norm: bool


def _never(_: Any) -> bool:
    return False


def _attention_bias(hf_config: Any) -> bool:
    return bool(hf_config.attention_bias)


_FAMILIES = {
    "LlamaForCausalLM": _Family(_attention_bias, _attention_bias, lambda hf_config: bool(hf_config.mlp_bias), False),
    "MistralForCausalLM": _Family(_never, _never, _never, False),
    "Qwen2ForCausalLM": _Family(lambda _: True, _never, _never, False),
    "Qwen3ForCausalLM": _Family(_attention_bias, _attention_bias, _never, True),
}
"""A new architecture of this kind is a line here."""


def load_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json of `folder`. ServiceError names what is not supported."""
    # Imported here: transformers takes seconds, and the errors of other modules should not wait for it.
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise invalid("model", f"config.json of {folder} can't be read: {error}") from error
    return from_hf_config(hf_config, _eos_token_ids(hf_config, folder / "generation_config.json"))


def from_hf_config(hf_config: Any, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Reduce a transformers config to what the forward needs. ServiceError names what is not supported."""
    family = _family(hf_config)
    if hf_config.hidden_act != "silu":
        raise invalid("model", f"hidden_act {hf_config.hidden_act!r} is not supported; supported: 'silu'")
    if getattr(hf_config, "quantization_config", None) is not None:
        raise invalid("model", "quantized weights are not supported; take the float16, bfloat16 or float32 ones")
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    return ModelConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=hf_config.rms_norm_eps,
        has_qkv_bias=family.has_qkv_bias(hf_config),
        has_output_bias=family.has_output_bias(hf_config),
        has_mlp_bias=family.has_mlp_bias(hf_config),
        has_qk_norm=family.has_qk_norm,
        has_tied_head=bool(hf_config.tie_word_embeddings),
        windows=_windows(hf_config),
        rope=load_rope(hf_config, head_dim),
        max_position_embeddings=hf_config.max_position_embeddings,
        eos_token_ids=eos_token_ids,
    )


def _family(hf_config: Any) -> _Family:
    architectures = hf_config.architectures or []
    for architecture in architectures:
        if architecture in _FAMILIES:
            return _FAMILIES[architecture]
    named = ", ".join(architectures) or "unknown"
    raise invalid("model", f"architecture {named} is not supported; supported: {', '.join(_FAMILIES)}")


def _windows(hf_config: Any) -> tuple[int | None, ...]:
    window = getattr(hf_config, "sliding_window", None)
    # Mistral's config has no layer_types: its window is every layer's.
    default_types = ["sliding_attention"] * hf_config.num_hidden_layers
    layer_types = getattr(hf_config, "layer_types", None) or default_types
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _eos_token_ids(hf_config: Any, generation_config: Path) -> tuple[int, ...]:
    # The generation config is what a model's authors keep up to date: instruct models end turns with ids it adds.
    generation = json.loads(generation_config.read_text()) if generation_config.is_file() else {}
    for eos_token_id in (generation.get("eos_token_id"), hf_config.eos_token_id):
        if eos_token_id is not None:
            return tuple(sorted({eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)))
    return ()
