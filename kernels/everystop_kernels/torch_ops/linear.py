"""Matrix product with weights."""

from torch import Tensor
from torch.nn import functional


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `ops.Linear`."""
    return functional.linear(x, weight, bias)
