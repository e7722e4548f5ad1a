"""The weights of a decoder: read from safetensors files, converted, fused where one product does for several."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from everystop.errors import ServiceError, invalid
from executor_svc.model.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """weight: [out_features, in_features]; bias: [out_features]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. The output features of fused projections follow each other: queries, keys, values; gate, up."""

    input_norm: Tensor
    qkv: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Projection
    post_attention_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """All of them, in one dtype."""

    embedding: Tensor
    """[vocab_size, hidden_size]"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """[vocab_size, hidden_size]; the embedding itself when tied."""


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> DecoderWeights:
    """Read the *.safetensors of `folder`. ServiceError names what is missing, misshapen or can't be read.

    Shows a progress bar on standard error when that is a terminal.
    """
    try:
        with _Checkpoint(folder, dtype) as checkpoint:
            return _read(checkpoint, config)
    except (SafetensorError, OSError) as error:
        raise invalid("model", f"weights in {folder} can't be read: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: those that the index names, or all *.safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    return sorted(folder.glob("*.safetensors"))


def _read(checkpoint: _Checkpoint, config: ModelConfig) -> DecoderWeights:
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = checkpoint.read("model.embed_tokens.weight", (vocab, hidden))
    layers = tuple(_read_layer(checkpoint, config, f"model.layers.{i}") for i in _progress(config.num_layers))
    norm = checkpoint.read("model.norm.weight", (hidden,))
    head = embedding if config.has_tied_head else checkpoint.read("lm_head.weight", (vocab, hidden))
    return DecoderWeights(embedding, layers, norm, head)


def _read_layer(checkpoint: _Checkpoint, config: ModelConfig, prefix: str) -> LayerWeights:
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    def head_norm(name: str) -> Tensor | None:
        return checkpoint.read(f"{attention}.{name}.weight", (head_dim,)) if config.has_qk_norm else None

    return LayerWeights(
        input_norm=checkpoint.read(f"{prefix}.input_layernorm.weight", (hidden,)),
        qkv=checkpoint.read_fused(
            {f"{attention}.q_proj": query_size, f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size},
            hidden,
            config.has_qkv_bias,
        ),
        query_norm=head_norm("q_norm"),
        key_norm=head_norm("k_norm"),
        output=checkpoint.read_fused({f"{attention}.o_proj": hidden}, query_size, config.has_output_bias),
        post_attention_norm=checkpoint.read(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate_up=checkpoint.read_fused(
            {f"{mlp}.gate_proj": intermediate, f"{mlp}.up_proj": intermediate}, hidden, config.has_mlp_bias
        ),
        down=checkpoint.read_fused({f"{mlp}.down_proj": hidden}, intermediate, config.has_mlp_bias),
    )


def _progress(num_layers: int) -> Iterator[int]:
    return iter(tqdm(range(num_layers), desc="Loading model", unit="layer", disable=not sys.stderr.isatty()))


class _Checkpoint:
    """The tensors of a folder by name. Files are mapped, so that only the tensor at hand is there twice."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._folder = folder
        self._dtype = dtype
        self._files = ExitStack()
        self._file_of: dict[str, Any] = {}  # safetensors has no type for an open file

    def __enter__(self) -> _Checkpoint:
        with ExitStack() as files:
            for path in weight_files(self._folder):
                file = files.enter_context(safe_open(path, framework="pt"))
                self._file_of.update(dict.fromkeys(file.keys(), file))
            self._files = files.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of its own memory."""
        tensor = torch.empty(shape, dtype=self._dtype)
        self._copy(name, tensor)
        return tensor

    def read_fused(self, out_features: dict[str, int], in_features: int, has_bias: bool) -> Projection:
        """The projections of these names and numbers of output features, one under the other."""
        total = sum(out_features.values())
        weight = torch.empty(total, in_features, dtype=self._dtype)
        bias = torch.empty(total, dtype=self._dtype) if has_bias else None
        start = 0
        for name, num_features in out_features.items():
            rows = slice(start, start + num_features)
            self._copy(f"{name}.weight", weight[rows])
            if bias is not None:
                self._copy(f"{name}.bias", bias[rows])
            start += num_features
        return Projection(weight, bias)

    def _copy(self, name: str, target: Tensor) -> None:
        if name not in self._file_of:
            raise self._refusal(f"has no tensor {name}")
        source = self._file_of[name].get_tensor(name)
        if source.shape != target.shape:
            raise self._refusal(f"has {name} of shape {list(source.shape)}; config.json says {list(target.shape)}")
        if not source.is_floating_point():
            raise self._refusal(f"has {name} as {source.dtype}; supported are floating point weights")
        target.copy_(source)

    def _refusal(self, what: str) -> ServiceError:
        return invalid("model", f"{self._folder} {what}")
