import pytest

from scheduler_svc.core import CoreConfig
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.seat_pool import SeatPool


def test_block_pool_gives_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert (pool.num_used_blocks, pool.num_free_blocks) == (3, 1)
    assert pool.allocate(0) == []
    assert pool.allocate(1) == [3]
    pool.check_integrity([0, 1, 2, 3])


def test_shared_block_is_free_after_its_last_release() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(2)
    assert block_ids is not None
    pool.share([0])
    pool.check_integrity([0, 0, 1])
    pool.release(block_ids)
    pool.check_integrity([0])
    assert (pool.num_used_blocks, pool.num_free_blocks) == (1, 1)
    pool.release([0])
    pool.check_integrity([])
    assert pool.num_free_blocks == 2


def test_block_pool_asserts_against_bugs() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="block 1 is free"):
        pool.release([1])
    with pytest.raises(AssertionError, match="block 1 is free"):
        pool.share([1])
    with pytest.raises(AssertionError, match="owners"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="owners"):
        pool.check_integrity([0, 0])


def test_seat_pool_gives_the_lowest_slot_and_names_each_exit_once() -> None:
    seats = SeatPool(3)
    assert [seats.take(), seats.take(), seats.take()] == [0, 1, 2]
    assert seats.num_free_seats == 0
    seats.leave(2)
    seats.leave(0)
    assert seats.take() == 0
    assert seats.take_exit_slots() == [2, 0]
    assert seats.take_exit_slots() == []
    seats.check_integrity([0, 1])
    with pytest.raises(AssertionError, match="lost or in two places"):
        seats.check_integrity([0])


VALID = {
    "block_size": 4,
    "num_blocks": 10,
    "vocab_size": 100,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 32,
    "max_prefill_chunk": 8,
    "watermark": 0.01,
}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_size", 0, "block_size must be at least 1, not 0"),
        ("num_blocks", 0, "num_blocks must be at least 1, not 0"),
        ("vocab_size", 0, "vocab_size must be at least 1, not 0"),
        ("max_num_seqs", 0, "max_num_seqs must be at least 1, not 0"),
        ("max_prefill_chunk", 0, "max_prefill_chunk must be at least 1, not 0"),
        ("max_model_len", 1, "max_model_len must be at least 2, not 1"),
        ("max_num_batched_tokens", 3, r"max_num_batched_tokens must be at least max_num_seqs \(4\), not 3"),
        ("watermark", 1.0, r"watermark must be in \[0, 1\), not 1.0"),
        ("watermark", -0.1, r"watermark must be in \[0, 1\), not -0.1"),
        ("watermark", float("nan"), r"watermark must be in \[0, 1\), not nan"),
    ],
)
def test_config_names_the_field_and_its_range(name: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoreConfig(**{**VALID, name: value})  # type: ignore[arg-type]  # one table for all fields


def test_config_counts_blocks() -> None:
    config = CoreConfig(**VALID)  # type: ignore[arg-type]  # one table for all fields
    assert [config.num_blocks_for(num_tokens) for num_tokens in (1, 4, 5, 8)] == [1, 1, 2, 2]
    assert config.num_watermark_blocks == 1
