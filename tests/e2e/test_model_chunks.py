"""A sequence is the same bits however it came this far: token by token, in chunks of any size, or all at once."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from everystop.plan import SamplingParams
from everystop.settings import ExecutorConfig
from executor_svc.backend import ScheduledSequence, Seat, StepBatch
from executor_svc.model import runner

NUM_TOKENS = 120
BLOCK_SIZE = 16
CUTS = {
    "all at once": [120],
    "two halves": [60, 60],
    "blocks": [*repeat(16, 7), 8],
    "odd": [*repeat(17, 7), 1],
    "token by token at the end": [90, *repeat(1, 30)],
    "a long one and a rest": [112, 8],
}


def compute(backend: runner.CpuBackend, token_ids: list[int], chunks: list[int]) -> tuple[list[float], list[Tensor]]:
    """Log-probabilities of the prompt, and keys and values of all its tokens, layer by layer."""
    backend.reset()
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    block_ids = list(range(-(-NUM_TOKENS // BLOCK_SIZE)))
    seat = Seat(0, "request", 1, list(token_ids), NUM_TOKENS, 0, block_ids, sampling)
    logprobs: list[float] = []
    for index, num_tokens in enumerate(chunks):
        samples = seat.num_computed_tokens + num_tokens == NUM_TOKENS
        part = ScheduledSequence(seat, num_tokens, samples=samples)
        output = backend.execute(StepBatch(index + 1, [], [] if index else [seat], [part]))
        seat.num_computed_tokens += num_tokens
        logprobs += chain.from_iterable(entry.logprobs for entry in output.logprobs if entry.is_prompt)
    return logprobs, [cache.flatten(1, 2)[:, :NUM_TOKENS].clone() for cache in backend._caches]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_cut_gives_the_same_bits(dtype: str, model_dir: Path, tokenizer: Tokenizer) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = tokenizer.encode(text).ids[:NUM_TOKENS]
    backend = runner.load(ExecutorConfig(model=str(model_dir), dtype=dtype, num_blocks=16, block_size=BLOCK_SIZE))
    assert isinstance(backend, runner.CpuBackend)
    logprobs, caches = compute(backend, token_ids, CUTS["all at once"])
    for cut, chunks in CUTS.items():
        cut_logprobs, cut_caches = compute(backend, token_ids, chunks)
        assert cut_logprobs == logprobs, cut
        for layer, (cut_cache, cache) in enumerate(zip(cut_caches, caches, strict=True)):
            assert torch.equal(cut_cache, cache), f"{cut}: layer {layer}"
    backend.close()
