"""Each sampling parameter by hand, and what a sequence's answer so far does to it."""

import dataclasses
import math

import pytest
import torch

from everystop.plan import SamplingParams, SequenceFailure
from executor_svc.backend import Seat
from executor_svc.model.sampler import Sampler, SamplerOutput
from executor_svc.model.sampler_draw import draw

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
LOGITS = [1.0, 4.0, 2.0, 3.0, 0.0]


def make_seat(sampling: SamplingParams, *, slot: int = 0, prompt: tuple[int, ...] = (0,), answer: tuple[int, ...] = ()):
    return Seat(slot, f"r{slot}", 1, [*prompt, *answer], len(prompt), 0, [], sampling)


def sample(logits: torch.Tensor, seats: list[Seat]) -> SamplerOutput:
    sampler = Sampler(logits.shape[-1], CPU)
    for seat in seats:
        sampler.admit(seat)
    return sampler.sample(logits, seats)


def choose(sampling: SamplingParams, logits: list[float] = LOGITS, **seat_options) -> int:
    output = sample(torch.tensor([logits]), [make_seat(sampling, **seat_options)])
    assert output.failures == []
    return output.token_ids[0]


def drawn_ids(sampling: SamplingParams, logits: list[float] = LOGITS, num_draws: int = 2000) -> list[int]:
    """What `num_draws` seeds give, from the same logits."""
    seats = [make_seat(dataclasses.replace(sampling, seed=slot), slot=slot) for slot in range(num_draws)]
    return sample(torch.tensor([logits]).repeat(num_draws, 1), seats).token_ids


def assert_follows(token_ids: list[int], probabilities: list[float]) -> None:
    expected = [len(token_ids) * probability for probability in probabilities]
    chi_square = sum((token_ids.count(i) - mean) ** 2 / mean for i, mean in enumerate(expected) if mean > 0)
    assert all(expected[token_id] > 0 for token_id in token_ids)
    # The 99.99 % quantile for 4 degrees of freedom, the most that is asked here.
    assert chi_square < 23.5


def softmax(logits: list[float]) -> list[float]:
    weights = [math.exp(logit) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def test_greedy_takes_the_lowest_of_the_largest():
    assert choose(GREEDY, [1.0, 3.0, 2.0, 3.0]) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_distribution_over_temperature(temperature):
    probabilities = softmax([logit / temperature for logit in LOGITS])
    assert_follows(drawn_ids(SamplingParams(temperature=temperature)), probabilities)


def test_positions_of_one_seed_follow_the_distribution():
    seats = [make_seat(SamplingParams(seed=11), slot=slot, answer=(0,) * slot) for slot in range(2000)]
    assert_follows(sample(torch.tensor([LOGITS]).repeat(2000, 1), seats).token_ids, softmax(LOGITS))


def test_seed_zero_is_a_seed():
    positions = range(64)
    by_seed = {
        seed: [choose(SamplingParams(seed=seed), [0.0] * 1000, answer=(1,) * position) for position in positions]
        for seed in (0, 1, 2**64 - 1)
    }
    assert len(set(by_seed[0])) > 32
    assert by_seed[0] == [choose(SamplingParams(seed=0), [0.0] * 1000, answer=(1,) * i) for i in positions]
    assert by_seed[0] != by_seed[1]
    assert by_seed[0] != by_seed[2**64 - 1]


def test_position_counts_in_the_answer_alone():
    of_prompts = {
        choose(SamplingParams(seed=3), [0.0] * 1000, prompt=(1,) * length, answer=(2, 2)) for length in (1, 9)
    }
    assert len(of_prompts) == 1


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(top_k=1), [1]),
        (SamplingParams(top_k=3), [1, 2, 3]),
        (SamplingParams(top_k=5), [0, 1, 2, 3, 4]),
        (SamplingParams(top_k=1_000_000), [0, 1, 2, 3, 4]),
        # The probabilities, best first, are 0.636, 0.234, 0.086, 0.032, 0.012.
        (SamplingParams(top_p=0.6), [1]),
        (SamplingParams(top_p=0.7), [1, 3]),
        (SamplingParams(top_p=0.9), [1, 2, 3]),
        (SamplingParams(top_p=1e-6), [1]),
        # Of the two best they are 0.731 and 0.269.
        (SamplingParams(top_k=2, top_p=0.72), [1]),
        (SamplingParams(top_k=2, top_p=0.74), [1, 3]),
        # Relative to the best they are 1, 0.368, 0.135, 0.050, 0.018.
        (SamplingParams(min_p=1.0), [1]),
        (SamplingParams(min_p=0.1), [1, 2, 3]),
        (SamplingParams(min_p=0.2, top_k=4), [1, 3]),
        (SamplingParams(allowed_token_ids=(0, 2)), [0, 2]),
        (SamplingParams(banned_token_ids=(1, 3)), [0, 2, 4]),
        (SamplingParams(allowed_token_ids=(0, 2, 3), banned_token_ids=(3,)), [0, 2]),
        (SamplingParams(top_k=2, banned_token_ids=(1,)), [2, 3]),
        (SamplingParams(min_tokens=1, end_token_ids=(1, 2)), [0, 3, 4]),
        (SamplingParams(min_tokens=0, end_token_ids=(1, 2)), [0, 1, 2, 3, 4]),
        # Filters come after temperature: at 3 the probabilities are 0.350, 0.250, 0.179, 0.129, 0.092.
        (SamplingParams(top_p=0.5, temperature=3.0), [1, 3]),
    ],
)
def test_filters_keep_what_they_should_in_proportion(sampling, kept):
    weights = [math.exp(logit / sampling.temperature) if i in kept else 0.0 for i, logit in enumerate(LOGITS)]
    assert_follows(drawn_ids(sampling), [weight / sum(weights) for weight in weights])


def test_top_k_keeps_the_lowest_ids_of_equals():
    assert set(drawn_ids(SamplingParams(top_k=3), [1.0, 2.0, 1.0, 1.0, 1.0], 200)) == {0, 1, 2}


@pytest.mark.parametrize(
    ("sampling", "options", "chosen"),
    [
        (SamplingParams(logit_bias=((2, 2.5), (4, 1.0))), {}, 2),
        (SamplingParams(logit_bias=((1, -100.0),)), {}, 3),
        (SamplingParams(logit_bias=((4, 100.0),)), {}, 4),
        # Banned is banned, whatever the bias.
        (SamplingParams(logit_bias=((4, 100.0),), banned_token_ids=(4,)), {}, 1),
        (SamplingParams(min_tokens=2, end_token_ids=(1,)), {"answer": (0,)}, 3),
        (SamplingParams(min_tokens=2, end_token_ids=(1,)), {"answer": (0, 0)}, 1),
        # 4 / 1.5 is less than 3; the prompt counts as well as the answer.
        (SamplingParams(repetition_penalty=1.5), {"prompt": (1,)}, 3),
        (SamplingParams(repetition_penalty=1.5), {"answer": (1, 1)}, 3),
        (SamplingParams(repetition_penalty=1.3), {"answer": (1, 1)}, 1),
        (SamplingParams(repetition_penalty=0.5), {"prompt": (2, 3)}, 3),
        # The penalty sees biased logits: (4 - 2) / 1 against 3 / 1, then (4 + 2) / 1.5 against 3.
        (SamplingParams(repetition_penalty=1.5, logit_bias=((1, 2.0),)), {"prompt": (1,)}, 1),
        (SamplingParams(presence_penalty=1.5), {"answer": (1, 1)}, 3),
        (SamplingParams(presence_penalty=0.9), {"answer": (1, 1)}, 1),
        (SamplingParams(presence_penalty=1.5), {"prompt": (1, 1)}, 1),
        (SamplingParams(frequency_penalty=0.6), {"answer": (1, 1)}, 3),
        (SamplingParams(frequency_penalty=0.6), {"answer": (1,)}, 1),
        (SamplingParams(frequency_penalty=0.6), {"prompt": (1, 1)}, 1),
        (SamplingParams(frequency_penalty=-2.0), {"answer": (2, 2)}, 2),
    ],
)
def test_adjustments_move_the_greedy_choice(sampling, options, chosen):
    assert choose(dataclasses.replace(sampling, temperature=0), **options) == chosen


def test_negative_logits_are_multiplied_by_the_repetition_penalty():
    assert choose(dataclasses.replace(GREEDY, repetition_penalty=2.0), [-1.0, -1.5], prompt=(0,)) == 1


def test_counts_grow_with_every_token():
    sampler = Sampler(40, CPU)
    logits = torch.zeros(1, 40)
    seat = make_seat(dataclasses.replace(GREEDY, presence_penalty=1.0), prompt=(7,))
    sampler.admit(seat)
    for _ in range(40):
        seat.token_ids += sampler.sample(logits, [seat]).token_ids
    assert seat.token_ids[1:] == list(range(40))


def test_frequency_adds_up_from_step_to_step():
    sampler = Sampler(2, CPU)
    seat = make_seat(dataclasses.replace(GREEDY, frequency_penalty=0.5))
    sampler.admit(seat)
    for _ in range(6):
        seat.token_ids += sampler.sample(torch.tensor([[1.2, 0.0]]), [seat]).token_ids
    # The first logit falls to 0.7, 0.2, -0.3, -0.8; from then on they take turns.
    assert seat.token_ids[1:] == [0, 0, 0, 1, 0, 1]


def test_readmission_goes_on_with_the_same_tokens():
    sampling = SamplingParams(
        temperature=1.3, seed=5, frequency_penalty=0.7, presence_penalty=0.4, repetition_penalty=1.2, min_tokens=6,
        end_token_ids=(3,), top_p=0.9,
    )  # fmt: skip
    logits = torch.randn(12, 1, 30, generator=torch.Generator().manual_seed(2)) * 2

    def run(preempt_before: int | None) -> list[int]:
        sampler = Sampler(30, CPU)
        seat = make_seat(sampling, prompt=(3, 4))
        sampler.admit(seat)
        for step, step_logits in enumerate(logits):
            if step == preempt_before:
                sampler.exit(seat)
                seat = dataclasses.replace(seat, slot=9, attempt=2)
                sampler.admit(seat)
            seat.token_ids += sampler.sample(step_logits, [seat]).token_ids
        return seat.token_ids

    undisturbed = run(preempt_before=None)
    assert len(set(undisturbed)) > 5
    assert all(run(step) == undisturbed for step in range(1, 12))


def test_a_new_sequence_in_the_slot_inherits_nothing():
    sampler = Sampler(5, CPU)
    former = make_seat(dataclasses.replace(GREEDY, banned_token_ids=(1,), presence_penalty=2.0), answer=(3,))
    sampler.admit(former)
    assert sampler.sample(torch.tensor([LOGITS]), [former]).token_ids == [2]
    sampler.exit(former)
    newcomer = make_seat(GREEDY)
    sampler.admit(newcomer)
    assert sampler.sample(torch.tensor([LOGITS]), [newcomer]).token_ids == [1]
    sampler.reset()
    with pytest.raises(KeyError):
        sampler.sample(torch.tensor([LOGITS]), [newcomer])


def test_greedy_and_seeded_rows_share_a_batch():
    kinds = [
        GREEDY,
        SamplingParams(top_k=1),
        SamplingParams(seed=4),
        dataclasses.replace(GREEDY, banned_token_ids=(1,)),
    ]
    seats = [make_seat(sampling, slot=slot) for slot, sampling in enumerate(kinds)]
    output = sample(torch.tensor([LOGITS]).repeat(4, 1), seats)
    assert output.token_ids == [1, 1, choose(SamplingParams(seed=4)), 3]


def test_logits_stay_as_they_are():
    logits = torch.tensor([LOGITS] * 3)
    kinds = [SamplingParams(top_p=0.5), SamplingParams(logit_bias=((0, 9.0),)), SamplingParams(repetition_penalty=2.0)]
    sample(logits, [make_seat(sampling, slot=slot) for slot, sampling in enumerate(kinds)])
    assert logits.tolist() == [LOGITS] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_point_type_will_do(dtype):
    kinds = [GREEDY, SamplingParams(top_k=1, num_logprobs=1), SamplingParams(seed=1)]
    seats = [make_seat(sampling, slot=slot) for slot, sampling in enumerate(kinds)]
    output = sample(torch.tensor([LOGITS] * 3, dtype=dtype), seats)
    assert output.token_ids == [1, 1, choose(SamplingParams(seed=1))]


@pytest.mark.parametrize("filters", [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.9)])
@pytest.mark.parametrize("temperature", [1e-6, 1e-45])
def test_a_tiny_temperature_is_nearly_greedy(filters, temperature):
    sampling = dataclasses.replace(filters, temperature=temperature)
    assert set(drawn_ids(sampling, [-5e4, 3e4, 2.9e4, -math.inf], 50)) == {1}
    assert set(drawn_ids(sampling, [1.0, 2.0, 2.0, 0.0], 50)) == {1, 2}


def test_a_tiny_temperature_does_without_denormal_numbers():
    torch.set_flush_denormal(True)
    try:
        assert set(drawn_ids(SamplingParams(temperature=1e-45), [1.0, 2.0, 2.0, 0.0], 50)) == {1, 2}
    finally:
        torch.set_flush_denormal(False)


def test_a_temperature_of_100_is_nearly_even():
    assert_follows(drawn_ids(SamplingParams(temperature=100)), softmax([logit / 100 for logit in LOGITS]))


@pytest.mark.parametrize("factor", [1e-45, 100.0])
def test_an_extreme_repetition_penalty_leaves_a_choice(factor):
    logits = [30.0, -30.0, 5.0]
    assert choose(SamplingParams(temperature=0, repetition_penalty=factor), logits, prompt=(0, 1)) == (
        0 if factor < 1 else 2
    )
    assert choose(SamplingParams(top_k=2, repetition_penalty=factor), logits, prompt=(0, 1)) in (0, 2)


@pytest.mark.parametrize("point", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("filters", [SamplingParams(), SamplingParams(top_p=0.99), SamplingParams(min_p=1e-6)])
def test_the_ends_of_the_unit_interval_hit_tokens_that_may_be_chosen(filters, point):
    # The first and the last tokens have probability 0.
    logits = torch.zeros(1, 150_000)
    logits[0, :1000] = logits[0, -1000:] = -math.inf
    (token_id,) = draw(logits, [filters], [point])
    assert 1000 <= token_id < 149_000
    if filters == SamplingParams():
        assert token_id == 1000 + min(int(point * 148_000), 147_999)


def test_each_token_of_a_long_thin_tail_can_be_hit():
    logits = torch.zeros(1, 150_000)
    logits[0, 0] = 20.0
    width = math.exp(-20)
    points = [0.9999 + i * width for i in range(100)]
    token_ids = draw(logits.repeat(100, 1), [SamplingParams()] * 100, points)
    # In float32, steps next to 1 are 30 of these tokens wide.
    assert len(set(token_ids)) > 95


def test_a_top_p_of_1_keeps_what_rounding_puts_beyond_1():
    # In float32 the three probabilities of a third add up to more than 1.
    logits = torch.tensor([[0.0, 0.0, 0.0, -18.4]])
    assert draw(logits, [SamplingParams(min_p=1e-12)], [1 - 2**-53]) == [3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("banned_token_ids", [(), (2,)])
def test_logits_that_are_not_finite_fail_their_row_alone(temperature, poison, banned_token_ids):
    logits = torch.tensor([LOGITS] * 3)
    logits[1, 2] = poison
    sampling = SamplingParams(temperature=temperature, top_k=1, banned_token_ids=banned_token_ids, num_logprobs=0)
    output = sample(logits, [make_seat(sampling, slot=slot) for slot in (3, 5, 8)])
    assert output.token_ids == [1, 0, 1]
    assert output.failures == [SequenceFailure(slot=5, reason="the model's logits are not finite")]
    assert [entry.slot for entry in output.logprobs] == [3, 8]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_excludes_every_token_fails_alone(temperature):
    excluding = SamplingParams(
        temperature=temperature, allowed_token_ids=(1, 2, 3), banned_token_ids=(2,), min_tokens=1, end_token_ids=(1, 3)
    )
    seats = [make_seat(GREEDY, slot=0), make_seat(excluding, slot=1)]
    output = sample(torch.tensor([LOGITS] * 2), seats)
    assert output.token_ids == [1, 0]
    (failure,) = output.failures
    assert failure.slot == 1
    assert failure.reason.startswith("no token is left to choose")


def test_no_seats_need_no_token():
    assert sample(torch.empty(0, 5), []) == SamplerOutput([], [], [])
