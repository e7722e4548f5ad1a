"""The limits that the core works within."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Checks itself: a value out of range raises ValueError with the field's name and its range."""

    block_size: int
    """Tokens per block."""
    num_blocks: int
    vocab_size: int
    max_num_seqs: int
    """Seats: sequences that the executor holds at once."""
    max_num_batched_tokens: int
    """The token budget of one step. At least `max_num_seqs`, so that every decode finds room in every step."""
    max_model_len: int
    """The most tokens that prompt and answer together may have."""
    max_prefill_chunk: int
    """The most tokens of one sequence in one step."""
    watermark: float
    """Share of the blocks that boarding leaves free, for the running sequences to grow into."""
    max_losses: int = 3
    """Lost executors that a request may have taken part in, without getting further, before it is given up."""

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "vocab_size", "max_num_seqs", "max_prefill_chunk", "max_losses"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), "
                f"not {self.max_num_batched_tokens}"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), not {self.watermark}")

    @property
    def num_watermark_blocks(self) -> int:
        """The watermark in blocks; at least one unless it is 0."""
        return math.ceil(self.num_blocks * self.watermark)

    @property
    def max_num_tokens(self) -> int:
        """The most tokens of prompt and answer that one sequence can have when it is alone.

        The last token of an answer is never computed, so it takes no room in a block.
        """
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold the keys and values of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)
