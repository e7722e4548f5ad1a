"""Every operation in plain torch: runs wherever torch runs, needs no compiler."""

from everystop_kernels.ops import Ops
from everystop_kernels.torch_ops.linear import linear
from everystop_kernels.torch_ops.paged_attention import plan_attention
from everystop_kernels.torch_ops.rms_norm import rms_norm
from everystop_kernels.torch_ops.rotary import rotary
from everystop_kernels.torch_ops.silu_and_mul import silu_and_mul
from everystop_kernels.torch_ops.write_kv import write_kv

OPS = Ops(
    rms_norm=rms_norm,
    rotary=rotary,
    silu_and_mul=silu_and_mul,
    linear=linear,
    write_kv=write_kv,
    plan_attention=plan_attention,
)
