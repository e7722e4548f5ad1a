"""The gated activation of the feed-forward layer."""

from torch import Tensor
from torch.nn import functional


def silu_and_mul(x: Tensor) -> Tensor:
    """See `ops.SiluAndMul`."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
