import math

import pytest
import torch

from everystop.plan import SamplingParams, SequenceLogprobs
from executor_svc.backend import Seat
from executor_svc.model.sampler import Sampler, prompt_logprobs

LOGITS = [1.0, 4.0, 2.0, 4.0, 0.0]
LOGPROBS = [logit - math.log(sum(math.exp(other) for other in LOGITS)) for logit in LOGITS]


def make_seat(sampling: SamplingParams, slot: int = 0) -> Seat:
    return Seat(slot, f"r{slot}", 1, [0, 3, 2, 4, 1], 4, 0, [], sampling)


def sample(*kinds: SamplingParams, dtype: torch.dtype = torch.float32) -> list[SequenceLogprobs]:
    sampler = Sampler(len(LOGITS), torch.device("cpu"))
    seats = [make_seat(sampling, slot) for slot, sampling in enumerate(kinds)]
    for seat in seats:
        sampler.admit(seat)
    return sampler.sample(torch.tensor([LOGITS] * len(seats), dtype=dtype), seats).logprobs


def test_only_those_who_ask_get_them():
    reported = sample(SamplingParams(num_logprobs=0), SamplingParams(), SamplingParams(num_logprobs=2))
    assert [(entry.slot, entry.is_prompt, entry.num_top) for entry in reported] == [(0, False, 0), (2, False, 2)]
    assert reported[0].top_token_ids == reported[0].top_logprobs == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_come_first_and_lower_ids_before_their_equals(dtype):
    (entry,) = sample(SamplingParams(temperature=0, num_logprobs=4), dtype=dtype)
    assert entry.token_ids == [1]
    assert entry.logprobs == pytest.approx([LOGPROBS[1]], abs=1e-6)
    assert entry.top_token_ids == [1, 3, 2, 0]
    assert entry.top_logprobs == pytest.approx([LOGPROBS[i] for i in (1, 3, 2, 0)], abs=1e-6)


def test_more_than_the_vocabulary_is_the_vocabulary():
    (entry,) = sample(SamplingParams(num_logprobs=20))
    assert entry.num_top == 5
    assert entry.top_token_ids == [1, 3, 2, 0, 4]


def test_they_are_of_the_model_itself():
    moved = SamplingParams(
        temperature=0, num_logprobs=1, logit_bias=((0, 50.0),), banned_token_ids=(1,), repetition_penalty=9.0
    )
    hot = SamplingParams(temperature=50, top_k=1, num_logprobs=1)
    biased, drawn = sample(moved, hot)
    assert biased.token_ids == [0]
    assert biased.logprobs == pytest.approx([LOGPROBS[0]], abs=1e-6)
    assert (biased.top_token_ids, drawn.token_ids) == ([1], [1])
    assert drawn.logprobs == pytest.approx([LOGPROBS[1]], abs=1e-6)


def test_prompt_logprobs_are_of_the_token_after_each_row():
    logits = torch.tensor([LOGITS, LOGITS[::-1]])
    entry = prompt_logprobs(logits, make_seat(SamplingParams(num_prompt_logprobs=2), 6), first_position=1)
    assert (entry.slot, entry.is_prompt, entry.num_top) == (6, True, 2)
    assert entry.token_ids == [2, 4]
    assert entry.logprobs == pytest.approx([LOGPROBS[2], LOGPROBS[0]], abs=1e-6)
    assert entry.top_token_ids == [1, 3, 1, 3]
    assert entry.top_logprobs == pytest.approx([LOGPROBS[1]] * 4, abs=1e-6)


def test_prompt_logprobs_of_the_chosen_tokens_alone():
    entry = prompt_logprobs(torch.tensor([LOGITS]), make_seat(SamplingParams(num_prompt_logprobs=0)), first_position=0)
    assert (entry.token_ids, entry.num_top, entry.top_token_ids, entry.top_logprobs) == ([3], 0, [], [])


def test_prompt_logprobs_end_with_the_prompt():
    with pytest.raises(AssertionError, match="token of the answer"):
        prompt_logprobs(torch.tensor([LOGITS] * 2), make_seat(SamplingParams(num_prompt_logprobs=0)), first_position=2)
