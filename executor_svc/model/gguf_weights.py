"""GGUF tensors to safetensors, under the names and in the row order of Hugging Face models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from safetensors import SafetensorError
from safetensors.torch import save_file

from executor_svc.model.gguf_file import GgufFile

_MAX_SHARD_BYTES = 2_000_000_000
"""Bounds the memory that a conversion takes, whatever the size of the model."""

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_IGNORED = {"rope_freqs.weight"}  # part of the configuration


def weights_dtype(file: GgufFile) -> torch.dtype:
    """The data type that the converted weights are saved in, one for the whole file.

    float32 where the file's own matrices have more precision than bfloat16. bfloat16 for what was quantized: it is half
    of the size on disk and half of the time to load, it is what these models were published in before they were
    quantized, and its rounding is small beside the error of the quantization itself.
    """
    exact = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.F64}
    matrices = (kind for name, kind in file.tensor_types.items() if len(file.shape(name)) > 1)
    return torch.float32 if exact.intersection(matrices) else torch.bfloat16


def hf_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a tensor, or None when these models have no such tensor."""
    if gguf_name in _OUTER_NAMES:
        return _OUTER_NAMES[gguf_name]
    match = _LAYER_TENSOR.fullmatch(gguf_name)
    if match is None or match["part"] not in _LAYER_NAMES:
        return None
    return f"model.layers.{match['layer']}.{_LAYER_NAMES[match['part']]}.{match['kind']}"


def check_tensors(file: GgufFile, config: dict[str, object]) -> None:
    """Refuses a file with a tensor too few or too many for `config`: what it computes would be silently wrong."""
    found = set(file.tensor_types) - _IGNORED
    expected = set(_expected_names(config))
    if missing := sorted(expected - found):
        raise file.error(f"has no tensor {missing[0]} ({len(missing)} missing)")
    if unknown := sorted(found - expected):
        raise file.error(f"tensor {unknown[0]} is unknown in this architecture ({len(unknown)} such)")


def _expected_names(config: dict[str, object]) -> Iterator[str]:
    yield from (name for name in _OUTER_NAMES if name != "output.weight" or not config["tie_word_embeddings"])
    has_head_norms = config["model_type"] == "qwen3"
    biased = {"attn_q", "attn_k", "attn_v"} if config["model_type"] == "qwen2" else set()
    if config.get("attention_bias"):
        biased |= {"attn_q", "attn_k", "attn_v", "attn_output"}
    if config.get("mlp_bias"):
        biased |= {"ffn_gate", "ffn_up", "ffn_down"}
    num_layers = config["num_hidden_layers"]
    assert isinstance(num_layers, int)
    for layer in range(num_layers):
        for part in _LAYER_NAMES:
            if part.endswith(("q_norm", "k_norm")) and not has_head_norms:
                continue
            yield f"blk.{layer}.{part}.weight"
            if part in biased:
                yield f"blk.{layer}.{part}.bias"


def save_weights(file: GgufFile, config: dict[str, object], dtype: torch.dtype, folder: Path) -> None:
    """Write all tensors into `folder`: model.safetensors, or several with an index when they are large.

    Raises OSError when the disk is full.
    """
    shards = _plan_shards(file, dtype)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, start=1):
        shard_name = "model.safetensors" if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            target_name = hf_name(name)
            assert target_name is not None, name
            # np.array copies: the values may be a view of the file, which torch must not write to.
            values = np.array(_hf_row_order(name, file.tensor(name), file.architecture, config))
            tensors[target_name] = torch.from_numpy(values).to(dtype)
            weight_map[target_name] = shard_name
        _save_shard(tensors, folder / shard_name)
    if len(shards) > 1:
        index_json = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2))


def _save_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    # The library makes it private to this user; a cache may be a volume that another one mounts.
    path.chmod(0o644)


def _plan_shards(file: GgufFile, dtype: torch.dtype) -> list[list[str]]:
    """The tensors' names in groups of at most `_MAX_SHARD_BYTES`, except for a single tensor that is larger."""
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for name in file.tensor_types:
        if name in _IGNORED:
            continue
        tensor_bytes = int(np.prod(file.shape(name))) * dtype.itemsize
        if shards[-1] and shard_bytes + tensor_bytes > _MAX_SHARD_BYTES:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(name)
        shard_bytes += tensor_bytes
    return shards


def _hf_row_order(
    name: str, values: npt.NDArray[np.float32], architecture: str, config: dict[str, object]
) -> npt.NDArray[np.float32]:
    """Undo the reordering of query and key rows, which GGUF has for "llama" alone.

    Rotary embedding turns pairs of rows of each head. Hugging Face pairs row i with row i + head_dim / 2; llama.cpp
    pairs neighbours, and its files are written for that:

        Hugging Face   a0 a1 a2 a3 | b0 b1 b2 b3      (half, pair)
        GGUF           a0 b0 a1 b1 a2 b2 a3 b3        (pair, half)
    """
    match = re.search(r"\.attn_(?P<kind>[qk])\.", name)
    if architecture != "llama" or match is None:
        return values
    num_heads = config["num_attention_heads" if match["kind"] == "q" else "num_key_value_heads"]
    assert isinstance(num_heads, int)
    by_pair = values.reshape(num_heads, -1, 2, *values.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return by_pair.swapaxes(1, 2).reshape(values.shape)
