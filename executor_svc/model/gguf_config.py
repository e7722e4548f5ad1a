"""GGUF metadata to a Hugging Face config.json."""

from __future__ import annotations

import numpy as np

from executor_svc.model.gguf_file import GgufFile

# GGUF writes Mistral as "llama", which it equals but for its sliding window.
_MODEL_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def model_config(file: GgufFile) -> dict[str, object]:
    """What config.json holds, all but the data type. Refuses what the executor's models can't express."""
    if file.architecture not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise file.error(f"architecture {file.architecture} is not supported; supported: {known}")
    prefix = file.architecture
    if file.get(f"{prefix}.expert_count", int, 0) > 0:
        raise file.error("mixtures of experts are not supported")
    hidden_size = file.get(f"{prefix}.embedding_length", int)
    num_heads = file.get(f"{prefix}.attention.head_count", int)
    head_dim = file.get(f"{prefix}.attention.key_length", int, hidden_size // num_heads)
    if file.get(f"{prefix}.attention.value_length", int, head_dim) != head_dim:
        raise file.error("keys and values of different lengths are not supported")
    if file.get(f"{prefix}.rope.dimension_count", int, head_dim) != head_dim:
        raise file.error("rotary embedding of a part of each head is not supported")
    sliding_window = file.get(f"{prefix}.attention.sliding_window", int, 0)
    model_type = "mistral" if prefix == "llama" and sliding_window else prefix
    config: dict[str, object] = {
        "architectures": [_MODEL_CLASSES[model_type]],
        "model_type": model_type,
        # The rows of the table, which some models pad beyond the tokens that have a name.
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.get(f"{prefix}.feed_forward_length", int),
        "num_hidden_layers": file.get(f"{prefix}.block_count", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.get(f"{prefix}.attention.head_count_kv", int, num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.get(f"{prefix}.context_length", int),
        "rms_norm_eps": _shortest(file.get(f"{prefix}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": file.get(f"{prefix}.rope.freq_base", float, 10_000.0),
        "rope_scaling": _rope_scaling(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensor_types,
    }
    if model_type == "mistral":
        config["sliding_window"] = sliding_window
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensor_types
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensor_types
    return config


def _shortest(value: float) -> float:
    """The decimal that was meant: 1e-05, which the file holds as float32, 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile, head_dim: int) -> dict[str, object] | None:
    if "rope_freqs.weight" in file.tensor_types:
        return _llama3_scaling(file, head_dim)
    prefix = f"{file.architecture}.rope.scaling"
    kind = file.get(f"{prefix}.type", str, "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise file.error(f"rope scaling {kind} is not supported; supported: linear, yarn, Llama 3's")
    scaling: dict[str, object] = {"rope_type": kind, "factor": file.get(f"{prefix}.factor", float)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.get(f"{prefix}.original_context_length", int)
    return scaling


def _llama3_scaling(file: GgufFile, head_dim: int) -> dict[str, object]:
    """Llama 3.1 and later, whose scaling GGUF keeps as one divisor for each frequency.

    All of these models share every constant but the factor; so the factor, the largest divisor, tells the whole. It is
    checked against all the divisors, because a model with other constants would be wrong only in long texts.
    """
    low, high, original_length = 1.0, 4.0, 8192
    divisors = file.tensor("rope_freqs.weight")
    factor = round(float(divisors.max()), 3)  # it is float32, and noise there would scale every angle
    theta = file.get(f"{file.architecture}.rope.freq_base", float, 10_000.0)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original_length / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise file.error("rope_freqs.weight does not follow Llama 3's rule, and no other is supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original_length,
    }
