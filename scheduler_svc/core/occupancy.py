"""Who is seated in the executor, and with which blocks."""

from __future__ import annotations

from bisect import insort

from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.seat_pool import SeatPool
from scheduler_svc.core.sequence import Seating, Sequence


class Occupancy:
    """The running sequences with all that they hold in one executor; as a new executor's, it begins empty."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._seats = SeatPool(config.max_num_seqs)
        self._blocks = BlockPool(config.num_blocks)
        self.running: list[Seating] = []
        """In the policy's order."""

    @property
    def num_free_seats(self) -> int:
        """Seats that can be taken now."""
        return self._seats.num_free_seats

    @property
    def num_used_blocks(self) -> int:
        """Blocks that running sequences hold."""
        return self._blocks.num_used_blocks

    def board(self, sequence: Sequence, now: float) -> Seating | None:
        """Seat a sequence in a free seat, with blocks for all tokens that it has; None when blocks are lacking.

        All of them, not those of the first chunk: long prompts that board on the promise of blocks run out of them
        together, and then throw each other out half computed, again and again. As it is a prefill never asks for a
        block, and only growing answers preempt. It holds its last blocks a few steps before it fills them, which is
        the price.

        The watermark keeps the same from happening one decode later: who boards into the last free block is the
        latest arrival, so the next one to cross a block boundary would throw it out. A sequence that is alone has
        nobody to leave room for, and would wait for ever on a small pool.
        """
        num_blocks = self._config.num_blocks_for(len(sequence.token_ids))
        num_reserved_blocks = self._config.num_watermark_blocks if self.running else 0
        if self._blocks.num_free_blocks - num_blocks < num_reserved_blocks:
            return None
        block_ids = self._blocks.allocate(num_blocks)
        assert block_ids is not None, "a sequence that is alone fits"
        seating = sequence.sit_down(self._seats.take(), block_ids, self._config.block_size, now)
        insort(self.running, seating, key=lambda seating: seating.sequence.order)
        return seating

    def append_block(self, seating: Seating) -> int | None:
        """Give one more block to a running sequence and return its id; None when no block is free."""
        block_ids = self._blocks.allocate(1)
        if block_ids is None:
            return None
        seating.block_ids += block_ids
        seating.num_block_tokens += self._config.block_size
        return block_ids[0]

    def leave(self, seating: Seating) -> None:
        """Free its seat and blocks, at once, whatever of it is still in flight.

        Plans in flight go on writing into its blocks, but the executor runs plans strictly in order, so the last such
        write lands before the first one of the next owner:

            plan k        A writes block 7
            plan k + 1    A writes block 7      <- the surplus token, scheduled before the result of k was in
            plan k + 2    A exits; B boards and writes block 7 from its beginning on, before it reads it
        """
        self.running.remove(seating)
        self._seats.leave(seating.slot)
        self._blocks.release(seating.block_ids)
        seating.is_seated = False

    def take_exit_slots(self) -> list[int]:
        """The slots that were left since the last call, for the next plan to name."""
        return self._seats.take_exit_slots()

    def check_integrity(self) -> None:
        """Assert that every seat and block is in exactly one place, and that what was scheduled has its blocks."""
        orders = [seating.sequence.order for seating in self.running]
        assert orders == sorted(orders), "the running are out of order"
        for seating in self.running:
            assert seating.is_seated
            assert seating.num_block_tokens == len(seating.block_ids) * self._config.block_size
            assert seating.num_computed_tokens < seating.num_tokens, "a seated sequence has something to compute"
            assert seating.num_computed_tokens <= seating.num_block_tokens, "a token has no block"
        self._seats.check_integrity(seating.slot for seating in self.running)
        self._blocks.check_integrity(block_id for seating in self.running for block_id in seating.block_ids)
