"""Rotary position embedding: from a model's configuration to tables of cosines and sines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everystop.errors import invalid


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """How positions turn into rotations."""

    inverse_frequencies: Callable[[int], tuple[Tensor, float]]
    """From max_model_len to [head_dim // 2] float32, and the factor of cosines and sines.

    Some scalings (dynamic, longrope) depend on the length of the sequence. They are fixed for the life of the executor
    by the longest sequence that it takes: keys in the cache keep their rotation while a sequence grows, and a token
    must not depend on when it was computed.
    """
    max_positions: int
    """Positions that the scaling reaches."""

    def tables(self, max_model_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [max_model_len, head_dim], as `everystop_kernels.ops.Rotary` takes them."""
        frequencies, factor = self.inverse_frequencies(max_model_len)
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def load_rope(hf_config: Any, head_dim: int) -> Rope:
    """The rotation of a transformers config. ServiceError names what is not supported."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = hf_config.rope_parameters
    rope_type = parameters["rope_type"]
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        supported = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
        raise invalid("model", f"rope_type {rope_type!r} is not supported; supported: {supported}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise invalid("model", "partial_rotary_factor is not supported unless it is 1")

    def inverse_frequencies(max_model_len: int) -> tuple[Tensor, float]:
        if rope_type == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            return 1.0 / parameters["rope_theta"] ** exponents, 1.0
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope_type](hf_config, torch.device("cpu"), seq_len=max_model_len)
        return frequencies, factor

    return Rope(inverse_frequencies, _max_positions(hf_config))


def _max_positions(hf_config: Any) -> int:
    # These scalings stretch what the model was trained on; for the others max_position_embeddings says it all.
    trained: int = hf_config.max_position_embeddings
    parameters = hf_config.rope_parameters
    factor = parameters.get("factor") or 1.0
    match parameters["rope_type"]:
        case "linear" | "dynamic":
            return int(trained * factor)
        case "yarn":
            return max(trained, int(parameters["original_max_position_embeddings"] * factor))
        case _:
            return trained
