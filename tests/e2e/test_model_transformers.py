"""The CPU backend on the default model: what it says is what transformers says, whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer

from everystop.plan import SamplingParams, SequenceLogprobs
from everystop.settings import ExecutorConfig
from executor_svc.backend import Backend, ScheduledSequence, Seat, StepBatch
from executor_svc.model import runner

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

NUM_BLOCKS = 64
GREEDY = SamplingParams(temperature=0.0, num_logprobs=5)

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Q: A bus leaves at 9:15 and takes 2 hours and 50 minutes. It makes a stop of 10 minutes on the way, after one "
    "hour. When does it arrive, and how long has it been on the road by then?\nA: Let us think step by step. The bus",
    "Once",
    "Roses are red, violets are blue, sugar is sweet, and",
]


def load(model_dir: Path, dtype: str) -> Backend:
    return runner.load(ExecutorConfig(model=str(model_dir), dtype=dtype, num_blocks=NUM_BLOCKS))


@pytest.fixture(scope="module")
def backend(model_dir: Path) -> Iterator[Backend]:
    backend = load(model_dir, "float32")
    yield backend
    backend.close()


class Bus:
    """Makes step batches by hand: one sequence for each prompt, a share of the blocks for each sequence."""

    def __init__(self, backend: Backend, prompts: Sequence[list[int]], sampling: SamplingParams) -> None:
        backend.reset()
        self._backend = backend
        self._step_id = 0
        free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(len(prompts))).tolist()
        num_blocks = NUM_BLOCKS // len(prompts)
        self.seats = [
            Seat(
                slot=slot,
                request_id=f"request-{slot}",
                attempt=1,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                num_computed_tokens=0,
                block_ids=[free.pop() for _ in range(num_blocks)],
                sampling=sampling,
            )
            for slot, prompt in enumerate(prompts)
        ]
        self.logprobs: list[list[SequenceLogprobs]] = [[] for _ in prompts]
        self.prompt_logprobs: list[list[SequenceLogprobs]] = [[] for _ in prompts]

    def run(self, num_answer_tokens: int, max_chunk: int) -> list[list[int]]:
        """All in every step, prompts in chunks, until each has its answer; returns the answers."""
        while unfinished := [seat for seat in self.seats if len(answer(seat)) < num_answer_tokens]:
            self._step(unfinished, max_chunk)
        return [answer(seat) for seat in self.seats]

    def _step(self, seats: list[Seat], max_chunk: int) -> None:
        self._step_id += 1
        lefts = [len(seat.token_ids) - seat.num_computed_tokens for seat in seats]
        scheduled = [
            ScheduledSequence(seat, min(left, max_chunk), samples=left <= max_chunk)
            for seat, left in zip(seats, lefts, strict=True)
        ]
        admitted = seats if self._step_id == 1 else []
        output = self._backend.execute(StepBatch(self._step_id, [], admitted, scheduled))
        assert not output.failures
        for entry in scheduled:
            entry.seat.num_computed_tokens += entry.num_tokens
        for seat, token_id in zip([e.seat for e in scheduled if e.samples], output.token_ids, strict=True):
            seat.token_ids.append(token_id)
        for logprobs in output.logprobs:
            kept = self.prompt_logprobs if logprobs.is_prompt else self.logprobs
            kept[logprobs.slot].append(logprobs)


def answer(seat: Seat) -> list[int]:
    return seat.token_ids[seat.num_prompt_tokens :]


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def test_the_backend_tells_what_it_offers(backend: Backend, model_dir: Path) -> None:
    info = backend.info
    assert (info.name, info.device, info.dtype) == ("cpu", "cpu", "float32")
    assert (info.model.vocab_size, info.model.eos_token_ids) == (49152, (2,))
    assert (info.block_size, info.num_blocks) == (16, NUM_BLOCKS)
    assert backend.tokenizer_files()["tokenizer.json"] == (model_dir / "tokenizer.json").read_bytes()


def test_a_length_that_shrinks_is_logged(model_dir: Path, lines: list[Any]) -> None:
    backend = load(model_dir, "bfloat16")
    assert backend.info.max_model_len == 16 * NUM_BLOCKS
    reduced = next(entry for entry in lines if entry["event"] == "max_model_len_reduced")
    assert (reduced["max_model_len"], reduced["model_max_model_len"]) == (16 * NUM_BLOCKS, 8192)


@torch.inference_mode()
def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    backend: Backend, prompts: list[list[int]], reference_model: LlamaForCausalLM
) -> None:
    # Chunks of 16, so that one batch holds parts of prompts, ends of prompts and decodes.
    bus = Bus(backend, prompts, GREEDY)
    answers = bus.run(num_answer_tokens=12, max_chunk=16)
    for prompt, tokens, logprobs in zip(prompts, answers, bus.logprobs, strict=True):
        generated = reference_model.generate(
            torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False,
            output_logits=True, return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert tokens == generated.sequences[0, len(prompt) :].tolist()
        check_logprobs(logprobs, tokens, torch.stack(generated.logits)[:, 0].log_softmax(-1), num_top=5)


@torch.inference_mode()
def test_prompt_logprobs_are_those_of_transformers(
    backend: Backend, prompts: list[list[int]], reference_model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A bound that the longest prompt's chunk goes past.
    monkeypatch.setattr(runner, "_MAX_PROMPT_LOGPROB_ROWS", 20)
    bus = Bus(backend, prompts, SamplingParams(temperature=0.0, num_prompt_logprobs=3))
    bus.run(num_answer_tokens=2, max_chunk=32)
    for prompt, logprobs in zip(prompts, bus.prompt_logprobs, strict=True):
        expected = reference_model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        check_logprobs(logprobs, prompt[1:], expected[:-1], num_top=3)


def check_logprobs(
    logprobs: Sequence[SequenceLogprobs], token_ids: list[int], expected: torch.Tensor, num_top: int
) -> None:
    """`expected`: [len(token_ids), vocab_size]."""
    assert [token_id for entry in logprobs for token_id in entry.token_ids] == token_ids
    chosen = torch.tensor([logprob for entry in logprobs for logprob in entry.logprobs])
    torch.testing.assert_close(chosen, expected[torch.arange(len(token_ids)), token_ids], rtol=0, atol=1e-4)
    top = [logprob for entry in logprobs for logprob in entry.top_logprobs]
    torch.testing.assert_close(torch.tensor(top), expected.topk(num_top).values.flatten(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_gets_the_same_bits_alone_and_among_others(
    model_dir: Path, prompts: list[list[int]], dtype: str
) -> None:
    backend = load(model_dir, dtype)
    together = Bus(backend, prompts, GREEDY)
    answers = together.run(num_answer_tokens=5, max_chunk=32)
    for slot in (0, 2, 3):  # a short prompt, one in two chunks, one of a single token
        alone = Bus(backend, [prompts[slot]], GREEDY)
        assert alone.run(num_answer_tokens=5, max_chunk=32) == [answers[slot]]
        assert [e.top_logprobs for e in alone.logprobs[0]] == [e.top_logprobs for e in together.logprobs[slot]]
    backend.close()
