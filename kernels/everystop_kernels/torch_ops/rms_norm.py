"""Root mean square norm."""

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.RmsNorm`."""
    return functional.rms_norm(x, weight.shape, weight, eps)
