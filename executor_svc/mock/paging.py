"""A shadow of the KV cache that turns every run of the mock into a check of the scheduler's paging.

Keys and values of a token depend on all tokens before it, so what a real cache holds for token i stands for the whole
prefix up to i. The shadow keeps just that: a hash of the prefix for the last token written to each block. When a step
reads a block table, each block must hold what this sequence would have written there:

    tokens        t0 t1 t2 t3 | t4 t5 t6 t7 | t8 t9
    block table   7           | 2           | 5
    shadow        [7] = hash(t0..t3)   [2] = hash(t0..t7)   [5] = hash(t0..t9)

A block that another sequence has overwritten meanwhile, or that was never written, does not match.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from executor_svc.backend import Seat

_START = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class PagedSequence:
    """What one sequence has written, and thus must find when it reads."""

    num_written: int = 0
    prefix_hash: int = _START
    """Of the tokens written so far."""
    block_hashes: list[int] = field(default_factory=list)
    """By place in the block table: the prefix hash at the last token in it."""


class ShadowCache:
    """One hash for each block of a KV cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: list[int | None] = [None] * num_blocks

    def admit(self, seat: Seat) -> PagedSequence:
        """The record of a sequence that comes with `seat.num_computed_tokens` tokens already in its blocks."""
        sequence = PagedSequence()
        self._extend(sequence, seat, seat.num_computed_tokens)
        return sequence

    def write(self, sequence: PagedSequence, seat: Seat, num_tokens: int) -> None:
        """Write the next `num_tokens` known tokens of `seat`, after those that it has computed."""
        assert sequence.num_written == seat.num_computed_tokens, (
            f"request {seat.request_id}: {seat.num_computed_tokens} tokens are computed, not {sequence.num_written}"
        )
        first_block = sequence.num_written // self._block_size
        self._extend(sequence, seat, num_tokens)
        for index in range(first_block, len(sequence.block_hashes)):
            self._hashes[seat.block_ids[index]] = sequence.block_hashes[index]

    def check(self, sequence: PagedSequence, seat: Seat) -> None:
        """Assert that the blocks hold all that the sequence has written. Raises AssertionError that names the block."""
        hashes = self._hashes
        found = [hashes[block_id] for block_id in seat.block_ids[: len(sequence.block_hashes)]]
        for index, expected in enumerate(sequence.block_hashes) if found != sequence.block_hashes else ():
            assert found[index] == expected, (
                f"request {seat.request_id}: block {seat.block_ids[index]}, number {index} in its table, "
                "does not hold its tokens"
            )

    def _extend(self, sequence: PagedSequence, seat: Seat, num_tokens: int) -> None:
        prefix_hash, block_hashes = sequence.prefix_hash, sequence.block_hashes
        for position in range(sequence.num_written, sequence.num_written + num_tokens):
            prefix_hash = hash((prefix_hash, seat.token_ids[position]))
            if position % self._block_size == 0:
                block_hashes.append(prefix_hash)
            else:
                block_hashes[-1] = prefix_hash
        sequence.prefix_hash = prefix_hash
        sequence.num_written += num_tokens
