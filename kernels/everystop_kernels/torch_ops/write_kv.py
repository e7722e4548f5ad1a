"""Keys and values into the paged cache."""

from torch import Tensor


def write_kv(cache: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """See `ops.WriteKv`."""
    num_tokens = slot_mapping.shape[0]
    slots = cache.flatten(1, 2)
    slots[0].index_copy_(0, slot_mapping, keys[:num_tokens])
    slots[1].index_copy_(0, slot_mapping, values[:num_tokens])
