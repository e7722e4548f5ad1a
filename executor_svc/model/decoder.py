"""The forward: all scheduled tokens as one flat row, through every layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from everystop_kernels.ops import AttentionShape, Ops, PagedAttention
from executor_svc.model.batch import ModelInputs
from executor_svc.model.config import ModelConfig
from executor_svc.model.weights import DecoderWeights, LayerWeights, Projection


class Decoder:
    """A Llama-family decoder. Every operation on numbers goes through `ops`."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, ops: Ops, *, max_model_len: int, block_size: int
    ) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        self._block_size = block_size
        self._cos, self._signed_sin = config.rope.tables(max_model_len, weights.embedding.dtype)

    def forward(self, inputs: ModelInputs, caches: list[Tensor]) -> Tensor:
        """Hidden states [num_rows, hidden_size]. Writes the rows' keys and values into `caches`, one for each layer."""
        attention = {window: self._plan_attention(inputs, window) for window in set(self._config.windows)}
        cos, signed_sin = self._cos[inputs.positions], self._signed_sin[inputs.positions]
        slot_mapping = inputs.ragged.slot_mapping
        hidden = functional.embedding(inputs.token_ids, self._weights.embedding)
        for layer, window, cache in zip(self._weights.layers, self._config.windows, caches, strict=True):
            normed = self._norm(hidden, layer.input_norm)
            query, keys, values = self._project(normed, layer, cos, signed_sin)
            self._ops.write_kv(cache, keys, values, slot_mapping)
            attended = attention[window](query, cache).flatten(1)
            hidden = hidden + self._linear(attended, layer.output)
            normed = self._norm(hidden, layer.post_attention_norm)
            activated = self._ops.silu_and_mul(self._linear(normed, layer.gate_up))
            hidden = hidden + self._linear(activated, layer.down)
        return self._norm(hidden, self._weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] as `forward` returns them to [num_rows, vocab_size]."""
        return self._ops.linear(hidden, self._weights.head, None)

    def _project(
        self, normed: Tensor, layer: LayerWeights, cos: Tensor, signed_sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Queries, keys and values as [num_rows, heads, head_dim]; queries and keys rotated together.
        num_heads, num_kv_heads = self._config.num_heads, self._config.num_kv_heads
        heads = self._linear(normed, layer.qkv).unflatten(1, (-1, self._config.head_dim))
        rotated_heads, values = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, keys = rotated_heads.split((num_heads, num_kv_heads), dim=1)
            rotated_heads = torch.cat((self._norm(query, layer.query_norm), self._norm(keys, layer.key_norm)), dim=1)
        query, keys = self._ops.rotary(rotated_heads, cos, signed_sin).split((num_heads, num_kv_heads), dim=1)
        return query, keys, values

    def _plan_attention(self, inputs: ModelInputs, window: int | None) -> PagedAttention:
        config = self._config
        shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, self._block_size, window)
        return self._ops.plan_attention(inputs.ragged, shape)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._ops.rms_norm(x, weight, self._config.norm_eps)

    def _linear(self, x: Tensor, projection: Projection) -> Tensor:
        return self._ops.linear(x, projection.weight, projection.bias)
