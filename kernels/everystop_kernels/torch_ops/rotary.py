"""Rotary position embedding."""

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """See `ops.Rotary`."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos[:, None, :], swapped, signed_sin[:, None, :])
