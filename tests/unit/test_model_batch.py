"""From scheduled sequences to tensors, against a twin that goes token by token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everystop.plan import SamplingParams
from executor_svc.backend import ScheduledSequence, Seat
from executor_svc.model.batch import ROW_MULTIPLE, build_inputs, select_rows


@st.composite
def scheduled_sequences(draw: st.DrawFn) -> tuple[list[ScheduledSequence], int]:
    """With blocks in any order, and more of them than the tokens need."""
    block_size = draw(st.integers(1, 5))
    free = iter(draw(st.permutations(range(100))))
    scheduled = []
    for slot in range(draw(st.integers(1, 4))):
        first, num_tokens, num_later = draw(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 2)))
        token_ids = draw(st.lists(st.integers(1, 1000), min_size=first + num_tokens, max_size=first + num_tokens))
        num_blocks = -(-len(token_ids) // block_size) + num_later
        block_ids = [next(free) for _ in range(num_blocks)]
        seat = Seat(slot, "", 1, token_ids + [7] * num_later, 1, first, block_ids, SamplingParams())
        scheduled.append(ScheduledSequence(seat, num_tokens, num_later == 0))
    return scheduled, block_size


@settings(deadline=None, derandomize=True, max_examples=200)
@given(scheduled_sequences())
def test_every_token_is_where_it_belongs(drawn: tuple[list[ScheduledSequence], int]) -> None:
    scheduled, block_size = drawn
    inputs = build_inputs(scheduled, block_size)
    ragged = inputs.ragged
    row = 0
    for i, entry in enumerate(scheduled):
        seat = entry.seat
        assert ragged.cu_seqlens_q[i] == row
        assert ragged.seq_lens[i] == seat.num_computed_tokens + entry.num_tokens
        for position in range(seat.num_computed_tokens, seat.num_computed_tokens + entry.num_tokens):
            block, offset = divmod(position, block_size)
            assert inputs.token_ids[row] == seat.token_ids[position]
            assert inputs.positions[row] == position
            assert ragged.slot_mapping[row] == seat.block_ids[block] * block_size + offset
            assert ragged.block_tables[i, block] == seat.block_ids[block]
            row += 1
    assert ragged.num_tokens == row == ragged.cu_seqlens_q[-1] == len(ragged.slot_mapping)
    assert row <= len(inputs.token_ids) == len(inputs.positions) < row + ROW_MULTIPLE
    assert len(inputs.token_ids) % ROW_MULTIPLE == 0


def test_selected_rows_come_first_and_are_padded() -> None:
    hidden = torch.arange(20.0)[:, None]
    selected = select_rows(hidden, [3, 19, 0])
    assert selected[:3, 0].tolist() == [3.0, 19.0, 0.0]
    assert len(selected) == ROW_MULTIPLE
