"""The sampler against a slow twin: one row, one token at a time, in Python's own floats."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everystop.plan import SamplingParams
from executor_svc.backend import Seat
from executor_svc.model.sampler import Sampler
from executor_svc.model.sampler_draw import draw
from executor_svc.model.sampler_top import top
from executor_svc.random import uniform

CPU = torch.device("cpu")
# Between float32 and Python's floats. Values this close to a limit may fall on either side of it.
TOLERANCE = 1e-5


def adjusted_logits(logits: list[float], params: SamplingParams, prompt: list[int], answer: list[int]) -> list[float]:
    bias = dict(params.logit_bias)
    adjusted = []
    for token_id, logit in enumerate(logits):
        value = logit + bias.get(token_id, 0.0)
        if params.allowed_token_ids and token_id not in params.allowed_token_ids:
            value = -math.inf
        if token_id in params.banned_token_ids:
            value = -math.inf
        if len(answer) < params.min_tokens and token_id in params.end_token_ids:
            value = -math.inf
        if token_id in prompt or token_id in answer:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * answer.count(token_id)
        value -= params.presence_penalty if token_id in answer else 0.0
        adjusted.append(value)
    return adjusted


def probabilities(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Of all tokens, in order of ids, after temperature and filters; 0 for those that do not pass."""
    best = max(logits)
    weights = [math.exp((logit - best) / temperature) for logit in logits]
    ranking = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    kept = ranking[:top_k] if top_k else ranking
    mass = sum(weights[token_id] for token_id in kept)
    within_top_p, before = [], 0.0
    for token_id in kept:
        if top_p < 1 and before >= top_p * mass:
            break
        within_top_p.append(token_id)
        before += weights[token_id]
    passed = {token_id for token_id in within_top_p if weights[token_id] >= min_p}
    total = sum(weights[token_id] for token_id in passed)
    return [weights[token_id] / total if token_id in passed else 0.0 for token_id in range(len(logits))]


def is_right_draw(token_id: int, point: float, filtered: list[float]) -> bool:
    low = sum(filtered[:token_id])
    return filtered[token_id] > 0 and low - TOLERANCE <= point <= low + filtered[token_id] + TOLERANCE


def is_right_choice(token_id: int, logits: list[float], seat: Seat) -> bool:
    params = seat.sampling
    prompt, answer = seat.token_ids[: seat.num_prompt_tokens], seat.token_ids[seat.num_prompt_tokens :]
    adjusted = adjusted_logits(logits, params, prompt, answer)
    if params.temperature == 0:
        return adjusted[token_id] >= max(adjusted) - TOLERANCE
    point = uniform(params.seed, len(answer))
    return any(
        is_right_draw(
            token_id,
            point,
            probabilities(
                adjusted, params.temperature, params.top_k, top_p, params.min_p * (1 + sign_min_p * TOLERANCE)
            ),
        )
        for top_p in (params.top_p, params.top_p - TOLERANCE, min(params.top_p + TOLERANCE, 1.0))
        for sign_min_p in (0, -1, 1)
    )


VOCAB_SIZE = 19
token_ids = st.integers(0, VOCAB_SIZE - 1)
end_ids = st.lists(token_ids, max_size=3, unique=True)


@st.composite
def sampling_params(draw_value) -> SamplingParams:
    def often_off(off, values):
        return draw_value(st.one_of(st.just(off), values))

    return SamplingParams(
        temperature=often_off(0.0, st.floats(1 / 16, 4, width=32)),
        top_p=often_off(1.0, st.floats(1 / 16, 1, width=32)),
        top_k=often_off(0, st.integers(1, VOCAB_SIZE + 2)),
        min_p=often_off(0.0, st.floats(1 / 64, 1, width=32)),
        repetition_penalty=often_off(1.0, st.floats(0.5, 2, width=32)),
        presence_penalty=often_off(0.0, st.floats(-2, 2, width=32)),
        frequency_penalty=often_off(0.0, st.floats(-2, 2, width=32)),
        seed=draw_value(st.integers(0, 2**64 - 1)),
        logit_bias=tuple(
            sorted(draw_value(st.dictionaries(token_ids, st.floats(-9, 9, width=32), max_size=3)).items())
        ),
        # Never all of them, so that something is left to choose.
        allowed_token_ids=often_off((), st.lists(token_ids, max_size=9).map(lambda ids: (*ids, *range(10, 18)))),
        banned_token_ids=tuple(draw_value(end_ids)),
        min_tokens=draw_value(st.integers(0, 4)),
        end_token_ids=tuple(draw_value(end_ids)),
    )


@st.composite
def rows(draw_value):
    """One sequence and its logits, on a grid: on the coarse one many are equal."""
    prompt = draw_value(st.lists(token_ids, min_size=1, max_size=6))
    answer = draw_value(st.lists(token_ids, max_size=6))
    steps_per_unit = draw_value(st.sampled_from([1, 64]))
    # One drawn seed: a list of that many drawn numbers would take most of the time.
    rng = random.Random(draw_value(st.integers(0, 2**32)))
    logits = [rng.randint(-8 * steps_per_unit, 8 * steps_per_unit) / steps_per_unit for _ in range(VOCAB_SIZE)]
    return prompt, answer, draw_value(sampling_params()), logits


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(rows(), min_size=1, max_size=6))
def test_every_row_is_what_the_slow_twin_may_choose(batch):
    sampler = Sampler(VOCAB_SIZE, CPU)
    seats = []
    for slot, (prompt, answer, params, _) in enumerate(batch):
        seats.append(Seat(slot, f"r{slot}", 1, prompt + answer, len(prompt), 0, [], params))
        sampler.admit(seats[-1])
    output = sampler.sample(torch.tensor([logits for *_, logits in batch]), seats)
    assert output.failures == []
    for token_id, seat, (*_, logits) in zip(output.token_ids, seats, batch, strict=True):
        assert is_right_choice(token_id, logits, seat), (token_id, seat)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(st.lists(rows(), min_size=1, max_size=6), st.lists(st.floats(0, 1, exclude_max=True), min_size=6, max_size=6))
def test_how_far_a_row_is_ranked_changes_nothing(batch, points):
    sampling = [params if params.temperature > 0 else SamplingParams(top_p=0.5) for _, _, params, _ in batch]
    logits = torch.tensor([logits for *_, logits in batch])
    whole = draw(logits.clone(), sampling, points[: len(batch)], prefix_widths=())
    for widths in ((1,), (2, 5), (1, 3, 9), (VOCAB_SIZE,)):
        assert draw(logits.clone(), sampling, points[: len(batch)], prefix_widths=widths) == whole


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.lists(st.integers(-2, 2), min_size=12, max_size=12), min_size=1, max_size=4), st.integers(1, 12))
def test_top_ranks_as_a_sort_by_value_and_id(scores, num_top):
    values, ids = top(torch.tensor(scores, dtype=torch.bfloat16), num_top)
    for row, row_scores in enumerate(scores):
        ranking = sorted(range(12), key=lambda token_id: (-row_scores[token_id], token_id))[:num_top]
        assert ids[row].tolist() == ranking
        assert values[row].tolist() == [row_scores[token_id] for token_id in ranking]


@pytest.mark.parametrize(("dtype", "vocab_size"), [(torch.float32, 49_152), (torch.bfloat16, 40_009)])
def test_a_row_gets_the_same_alone_and_among_others(dtype, vocab_size):
    kinds = [
        SamplingParams(num_logprobs=3),
        SamplingParams(temperature=0, num_logprobs=0),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.5, top_p=0.98),
        SamplingParams(top_k=200, repetition_penalty=1.3, num_logprobs=2),
        SamplingParams(min_p=0.02, frequency_penalty=0.5),
        SamplingParams(top_k=5, top_p=0.5, banned_token_ids=(1, 2)),
    ]
    logits = (3 * torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(5))).to(dtype)
    seats = [
        Seat(slot, f"r{slot}", 1, [slot, slot, 9], 1, 0, [], kinds[slot % len(kinds)]) for slot in range(len(logits))
    ]

    def sample(slots):
        sampler = Sampler(vocab_size, CPU)
        for slot in slots:
            sampler.admit(seats[slot])
        return sampler.sample(logits[slots], [seats[slot] for slot in slots])

    together = sample(list(range(len(seats))))
    logprobs = {entry.slot: entry for entry in together.logprobs}
    for slots in ([0], [1], [2], [3], [4], [5], [6], [62, 63], [7, 11, 19]):
        some = sample(slots)
        assert some.token_ids == [together.token_ids[slot] for slot in slots]
        assert some.logprobs == [logprobs[slot] for slot in slots if slot in logprobs]
