"""The paged KV cache: how many blocks there are, and which length of sequence they allow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from everystop.errors import invalid
from everystop.settings import ExecutorConfig
from executor_svc.model.config import ModelConfig

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """What the pool holds."""

    num_blocks: int
    block_size: int
    block_bytes: int
    """Of one block: keys and values in all layers."""
    max_model_len: int

    @property
    def num_bytes(self) -> int:
        """Of the whole pool."""
        return self.num_blocks * self.block_bytes


def plan_cache(model: ModelConfig, config: ExecutorConfig, dtype: torch.dtype) -> CacheGeometry:
    """Size the pool from its memory limit or number of blocks.

    A `max_model_len` that is asked for and does not fit is refused, with what it needs, what there is and the largest
    that fits; one that is left out becomes the model's own or, if that does not fit, the largest that does.
    """
    vector_bytes = model.num_kv_heads * model.head_dim * dtype.itemsize
    block_bytes = 2 * model.num_layers * config.block_size * vector_bytes
    budget_bytes = int(config.kv_cache_gib * _GIB)
    num_blocks = budget_bytes // block_bytes if config.num_blocks is None else config.num_blocks
    if num_blocks == 0:
        raise invalid(
            "kv_cache_gib",
            f"{config.kv_cache_gib} GiB ({budget_bytes} bytes) hold no block of {config.block_size} tokens; "
            f"one needs {block_bytes} bytes",
        )
    fitting_len = min(num_blocks * config.block_size, model.rope.max_positions)
    if config.max_model_len is None:
        max_model_len = min(fitting_len, model.max_position_embeddings)
    else:
        _check_max_model_len(config.max_model_len, fitting_len, model, num_blocks, block_bytes, config.block_size)
        max_model_len = config.max_model_len
    return CacheGeometry(num_blocks, config.block_size, block_bytes, max_model_len)


def allocate_cache(model: ModelConfig, geometry: CacheGeometry, dtype: torch.dtype) -> list[Tensor]:
    """One tensor for each layer, as `everystop_kernels.ops` lays it out. ServiceError when the memory is not there."""
    available_bytes = available_memory_bytes()
    if available_bytes is not None and geometry.num_bytes > available_bytes:
        raise invalid(
            "kv_cache_gib",
            f"the KV cache needs {geometry.num_bytes} bytes ({geometry.num_bytes / _GIB:.2f} GiB, "
            f"{geometry.num_blocks} blocks); {available_bytes} bytes ({available_bytes / _GIB:.2f} GiB, "
            f"{available_bytes // geometry.block_bytes} blocks) of memory are free",
        )
    shape = (2, geometry.num_blocks, geometry.block_size, model.num_kv_heads, model.head_dim)
    # Zeros, not empty: pages are touched now, so that memory which isn't there is missed here, not in some later step.
    return [torch.zeros(shape, dtype=dtype) for _ in range(model.num_layers)]


def available_memory_bytes() -> int | None:
    """What this process may still take: of the machine and of its control group. None where neither can be read."""
    limits = [limit for limit in (_machine_bytes(), _control_group_bytes()) if limit is not None]
    return min(limits, default=None)


def _check_max_model_len(
    wanted: int, fitting_len: int, model: ModelConfig, num_blocks: int, block_bytes: int, block_size: int
) -> None:
    if wanted > model.rope.max_positions:
        raise invalid(
            "max_model_len",
            f"{wanted} is more than the model's {model.rope.max_positions} positions; at most {fitting_len}",
        )
    needed_blocks = -(-wanted // block_size)
    if needed_blocks > num_blocks:
        raise invalid(
            "max_model_len",
            f"{wanted} tokens need {needed_blocks} KV blocks ({needed_blocks * block_bytes} bytes); "
            f"{num_blocks} blocks ({num_blocks * block_bytes} bytes) are available; "
            f"the largest max_model_len that fits is {fitting_len}",
        )


def _machine_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _control_group_bytes() -> int | None:
    # Inside a container its own group is the root of what it sees.
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used_bytes = int((group / "memory.current").read_text())
        shares = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    # Cached files, such as the weights just read, give way.
    return None if limit == "max" else int(limit) - used_bytes + int(shares["file"])
