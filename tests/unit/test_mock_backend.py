"""The mock backend, driven through the seats as the engine does."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from everystop.errors import ServiceError
from everystop.plan import Hello, NewSequence, SamplingParams, StepPlan, StepResult
from everystop.settings import ExecutorConfig
from executor_svc.engine import run_step
from executor_svc.mock import MockBackend
from executor_svc.mock.failures import Failure, FailureKind, parse_failures
from executor_svc.mock.tokenizer import END_OF_TEXT_ID, TURN_END_ID, VOCAB_SIZE
from executor_svc.plan_checks import Limits
from executor_svc.seats import Seats

GREEDY = SamplingParams(temperature=0.0)
PROMPT = list(b"Once upon a time")


def mock(**settings: Any) -> MockBackend:
    return MockBackend(ExecutorConfig(**{"backend": "mock", "mock_step_ms": 0.0, "block_size": 4, **settings}))


class Rig:
    """One session on a backend."""

    def __init__(self, backend: MockBackend) -> None:
        self.backend = backend
        self.seats = Seats(Limits.of(backend.info, Hello(64, 4096)), epoch=1)
        self.step_id = 0

    def step(self, **changes: Any) -> StepResult:
        self.step_id += 1
        return run_step(self.seats, self.backend, StepPlan(self.step_id, epoch=1, **changes))

    def generate(
        self,
        sampling: SamplingParams = GREEDY,
        num_tokens: int = 12,
        prompt: Sequence[int] = PROMPT,
        num_known: int = 0,
        chunk: int = 1000,
    ) -> list[int]:
        """What slot 0 answers; `num_known` tokens of it are already known when it is seated."""
        known = self.generate(sampling, num_known, prompt) if num_known else []
        token_ids = [*prompt, *known]
        blocks = list(range((len(token_ids) + num_tokens) // 4 + 1))
        admissions = [NewSequence(0, "request", 0, token_ids, len(prompt), 0, blocks, sampling)]
        answer: list[int] = list(known)
        for start in range(0, len(token_ids), chunk):
            size = min(chunk, len(token_ids) - start)
            result = self.step(
                admissions=admissions, chunk_slots=[0], chunk_num_tokens=[size], num_seqs=1, num_tokens=size
            )
            admissions = []
        while True:
            answer += result.token_ids
            if len(answer) == num_tokens:
                break
            result = self.step(num_seqs=1, num_tokens=1)
        self.leave()
        return answer

    def leave(self) -> None:
        """Slot 0 exits; slot 63 comes and goes, so that there is something to compute."""
        visitor = NewSequence(63, "visitor", 0, [1], 1, 0, [1000], GREEDY)
        self.step(
            exit_slots=[0], admissions=[visitor], chunk_slots=[63], chunk_num_tokens=[1], num_seqs=1, num_tokens=1
        )
        self.seats = Seats(Limits.of(self.backend.info, Hello(64, 4096)), epoch=1)
        self.step_id = 0
        self.backend.reset()


def generate(sampling: SamplingParams = GREEDY, num_tokens: int = 12, settings: Any = None, **kwargs: Any) -> list[int]:
    return Rig(mock(**(settings or {}))).generate(sampling, num_tokens, **kwargs)


def test_an_answer_is_the_same_every_time_and_reads_like_text() -> None:
    answer = generate(num_tokens=200)
    assert answer == generate(num_tokens=200)
    text = bytes(answer).decode()
    assert all(character.islower() or character in " ,." for character in text)
    assert 10 < text.count(" ") < 80


def test_an_answer_depends_on_the_prompt() -> None:
    assert generate() != generate(prompt=[*PROMPT, 33])


def test_a_drawn_answer_depends_on_the_seed_and_a_greedy_one_does_not() -> None:
    drawn = [generate(SamplingParams(seed=seed), 40) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert generate(replace(GREEDY, seed=0)) == generate(replace(GREEDY, seed=1))


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=7)])
def test_chunks_and_recomputing_change_no_token(sampling: SamplingParams) -> None:
    whole = generate(sampling)
    assert generate(sampling, chunk=3) == whole
    assert generate(sampling, num_known=5) == whole


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=7)])
def test_allowed_and_banned_tokens_are_kept_to(sampling: SamplingParams) -> None:
    allowed = tuple(b"eta")
    assert set(generate(replace(sampling, allowed_token_ids=allowed), 50)) == set(allowed)
    both = replace(sampling, allowed_token_ids=allowed, banned_token_ids=(ord("e"),))
    assert set(generate(both, 50)) == set(b"ta")
    assert ord(" ") not in generate(replace(sampling, banned_token_ids=(ord(" "),)), 50)


def test_a_bias_weighs_a_token() -> None:
    bias = ((ord("q"), 100.0), (ord("e"), -100.0))
    assert set(generate(replace(GREEDY, logit_bias=bias[:1]))) == {ord("q")}
    assert ord("e") not in generate(SamplingParams(logit_bias=bias[1:]), 100)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=3)])
def test_no_end_token_before_min_tokens(sampling: SamplingParams) -> None:
    sampling = replace(sampling, min_tokens=5, end_token_ids=(END_OF_TEXT_ID, TURN_END_ID))
    answer = generate(sampling, 8, {"mock_eos_rate": 1.0})
    assert TURN_END_ID not in answer[:5]
    assert answer[5:] == [TURN_END_ID] * 3


def test_the_end_comes_as_often_as_asked() -> None:
    counts = Counter(generate(num_tokens=4000, settings={"mock_eos_rate": 0.1}, chunk=1))
    assert 300 < counts[TURN_END_ID] < 500


def test_no_token_to_choose_fails_the_sequence_alone() -> None:
    rig = Rig(mock())
    hopeless = replace(GREEDY, allowed_token_ids=(65,), banned_token_ids=(65,))
    admissions = [
        NewSequence(0, "hopeless", 0, PROMPT, 16, 0, [0, 1, 2, 3], hopeless),
        NewSequence(1, "fine", 0, PROMPT, 16, 0, [4, 5, 6, 7], GREEDY),
    ]
    result = rig.step(admissions=admissions, chunk_slots=[0, 1], chunk_num_tokens=[16, 16], num_seqs=2, num_tokens=32)
    assert [failure.slot for failure in result.failures] == [0]
    assert result.token_ids == [0, generate(num_tokens=1)[0]]


def test_logprobs_are_those_of_a_distribution() -> None:
    rig = Rig(mock())
    sampling = replace(SamplingParams(seed=1), num_logprobs=VOCAB_SIZE)
    admission = NewSequence(0, "request", 0, PROMPT, 16, 0, [0, 1, 2, 3, 4], sampling)
    result = rig.step(admissions=[admission], chunk_slots=[0], chunk_num_tokens=[16], num_seqs=1, num_tokens=16)
    (logprobs,) = result.logprobs
    assert (logprobs.slot, logprobs.is_prompt, logprobs.token_ids) == (0, False, result.token_ids)
    assert sorted(logprobs.top_token_ids) == list(range(VOCAB_SIZE))
    assert logprobs.top_logprobs == sorted(logprobs.top_logprobs, reverse=True)
    assert math.isclose(sum(math.exp(logprob) for logprob in logprobs.top_logprobs), 1.0)
    index = logprobs.top_token_ids.index(result.token_ids[0])
    assert logprobs.logprobs == [logprobs.top_logprobs[index]]


def test_a_greedy_token_is_the_most_likely_one() -> None:
    rig = Rig(mock())
    admission = NewSequence(0, "request", 0, PROMPT, 16, 0, [0, 1, 2, 3, 4], replace(GREEDY, num_logprobs=2))
    result = rig.step(admissions=[admission], chunk_slots=[0], chunk_num_tokens=[16], num_seqs=1, num_tokens=16)
    assert result.logprobs[0].top_token_ids[0] == result.token_ids[0]
    assert len(result.logprobs[0].top_token_ids) == 2


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_prompt_logprobs_start_at_the_second_token_and_do_not_depend_on_chunks(chunk: int) -> None:
    def of_prompt(chunk: int) -> list[tuple[int, float]]:
        rig = Rig(mock())
        sampling = replace(GREEDY, num_prompt_logprobs=1)
        admissions = [NewSequence(0, "request", 0, PROMPT, 16, 0, [0, 1, 2, 3, 4], sampling)]
        rows = []
        for start in range(0, 16, chunk):
            size = min(chunk, 16 - start)
            result = rig.step(
                admissions=admissions, chunk_slots=[0], chunk_num_tokens=[size], num_seqs=1, num_tokens=size
            )
            admissions = []
            for entry in result.logprobs:
                assert entry.is_prompt
                assert len(entry.top_token_ids) == len(entry.token_ids)
                rows += list(zip(entry.token_ids, entry.logprobs, strict=True))
        return rows

    assert [token_id for token_id, _ in of_prompt(chunk)] == PROMPT[1:]
    assert of_prompt(chunk) == of_prompt(16)


def test_a_step_takes_as_long_as_modelled_and_errors_do_not_add_up() -> None:
    rig = Rig(mock(mock_step_ms=4.0, mock_token_us=100.0))
    start = time.monotonic()
    rig.step(
        admissions=[NewSequence(0, "request", 0, PROMPT, 16, 0, list(range(9)), GREEDY)],
        chunk_slots=[0],
        chunk_num_tokens=[16],
        num_seqs=1,
        num_tokens=16,
    )
    results = [rig.step(num_seqs=1, num_tokens=1) for _ in range(10)]
    modelled_s = 11 * 0.004 + 26 * 0.0001
    assert time.monotonic() - start >= modelled_s - 1e-4
    assert statistics.median(result.timings.forward_us for result in results) >= 3_500


def test_a_block_that_another_overwrote_is_noticed() -> None:
    rig = Rig(mock())
    backend = rig.backend
    first = NewSequence(0, "first", 0, PROMPT, 16, 0, [0, 1, 2, 3, 4], GREEDY)
    batch = rig.seats.apply(
        StepPlan(1, 1, admissions=[first], chunk_slots=[0], chunk_num_tokens=[16], num_seqs=1, num_tokens=16)
    )
    rig.seats.commit(batch, backend.execute(batch))
    # A second scheduler's view of the same cache, which thinks that block 2 is free.
    other = Seats(Limits.of(backend.info, Hello(64, 4096)), epoch=1)
    intruder = NewSequence(1, "intruder", 0, [9, 9], 2, 0, [2], GREEDY)
    backend.execute(
        other.apply(
            StepPlan(1, 1, admissions=[intruder], chunk_slots=[1], chunk_num_tokens=[2], num_seqs=1, num_tokens=2)
        )
    )
    with pytest.raises(AssertionError, match="request first: block 2, number 2 in its table"):
        backend.execute(rig.seats.apply(StepPlan(2, 1, num_seqs=1, num_tokens=1)))


def test_a_prefix_that_was_never_written_is_noticed() -> None:
    rig = Rig(mock())
    admission = NewSequence(0, "request", 0, PROMPT, 16, 8, [0, 1, 2, 3, 4], GREEDY)
    with pytest.raises(AssertionError, match="request request: block 0"):
        rig.step(admissions=[admission], chunk_slots=[0], chunk_num_tokens=[8], num_seqs=1, num_tokens=8)


def test_a_prefix_that_another_has_written_is_found() -> None:
    rig = Rig(mock())
    first = NewSequence(0, "first", 0, PROMPT, 16, 0, [0, 1, 2, 3, 4], GREEDY)
    rig.step(admissions=[first], chunk_slots=[0], chunk_num_tokens=[16], num_seqs=1, num_tokens=16)
    second = NewSequence(1, "second", 0, PROMPT, 16, 8, [0, 1, 5, 6, 7], GREEDY)
    result = rig.step(admissions=[second], chunk_slots=[1], chunk_num_tokens=[8], num_seqs=2, num_tokens=9)
    assert result.token_ids == generate(num_tokens=2)[::-1]


def test_steps_on_which_something_fails_count_over_resets() -> None:
    rig = Rig(mock(mock_fail="error@2"))
    admission = NewSequence(0, "request", 0, [1], 1, 0, [0], GREEDY)
    first = {"admissions": [admission], "chunk_slots": [0], "chunk_num_tokens": [1], "num_seqs": 1, "num_tokens": 1}
    rig.step(**first)
    rig.backend.reset()
    with pytest.raises(RuntimeError, match="step 2 fails on demand"):
        Rig(rig.backend).step(**first)
    rig.backend.reset()
    Rig(rig.backend).step(**first)


def test_a_slow_step_is_slower_by_what_was_asked() -> None:
    rig = Rig(mock(mock_fail="slow@1:40"))
    admission = NewSequence(0, "request", 0, [1], 1, 0, [0], GREEDY)
    slow = rig.step(admissions=[admission], chunk_slots=[0], chunk_num_tokens=[1], num_seqs=1, num_tokens=1)
    assert slow.timings.forward_us >= 39_000


def test_failures_are_read_by_step() -> None:
    assert parse_failures("die@40, hang@80,slow@20:500") == {
        40: Failure(FailureKind.DIE),
        80: Failure(FailureKind.HANG),
        20: Failure(FailureKind.SLOW, 500),
    }
    assert parse_failures("") == {}


@pytest.mark.parametrize("spec", ["die", "explode@3", "die@x", "slow@3", "die@3:5", "die@0", "die@3,hang@3", "die@-1"])
def test_what_cannot_be_read_names_the_setting_and_the_entry(spec: str) -> None:
    with pytest.raises(ServiceError) as refused:
        mock(mock_fail=spec)
    assert refused.value.field == "mock_fail"
    assert spec.rpartition(",")[2] in refused.value.message


def test_sizes_come_from_the_configuration() -> None:
    info = mock().info
    assert (info.block_size, info.num_blocks, info.max_model_len) == (4, 8192, 131_072)
    info = mock(num_blocks=5, max_model_len=9, max_num_seqs=3, max_num_batched_tokens=7).info
    assert (info.num_blocks, info.max_model_len, info.max_num_seqs, info.max_num_batched_tokens) == (5, 9, 3, 7)


def test_the_fingerprint_tells_models_apart() -> None:
    assert mock().info.model == mock().info.model
    assert mock().info.model.fingerprint != mock(mock_eos_rate=0.5).info.model.fingerprint
