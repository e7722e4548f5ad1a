"""Who owns which KV block."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Reference-counted blocks, numbered from 0. It knows ids alone; keys and values live in the executor.

    A block has one reference when it is allocated, one more for each `share`, and is free again when the last is
    released.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A stack, lowest id on top: a block that was just used is the likeliest to be in a cache still.
        self._free_ids = list(range(num_blocks - 1, -1, -1))
        self._num_references = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free_ids)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds; one that is shared counts once."""
        return self.num_blocks - len(self._free_ids)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take `num_blocks` free blocks, each with one reference; None, and none taken, when there are not as many."""
        num_left = len(self._free_ids) - num_blocks
        if num_left < 0:
            return None
        block_ids = self._free_ids[num_left:]
        block_ids.reverse()
        del self._free_ids[num_left:]
        for block_id in block_ids:
            self._num_references[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each of these blocks, which are in use."""
        for block_id in block_ids:
            assert self._num_references[block_id] > 0, f"block {block_id} is free"
            self._num_references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference of each of these blocks; those without any are free from now on."""
        for block_id in block_ids:
            assert self._num_references[block_id] > 0, f"block {block_id} is free"
            self._num_references[block_id] -= 1
            if self._num_references[block_id] == 0:
                self._free_ids.append(block_id)

    def check_integrity(self, owned_block_ids: Iterable[int]) -> None:
        """Assert that the references are just those of `owned_block_ids` (repeated where shared), the rest is free."""
        num_owners = [0] * self.num_blocks
        for block_id in owned_block_ids:
            num_owners[block_id] += 1
        assert num_owners == self._num_references, "a block has more or fewer owners than references"
        free_ids = [block_id for block_id, num_references in enumerate(self._num_references) if num_references == 0]
        assert sorted(self._free_ids) == free_ids, "a free block is missing or listed twice"
