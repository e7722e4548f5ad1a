"""The whole service on the real model: 32 prompts at once, in chunks, preempted, and every token is transformers'."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer

from everystop.client import AsyncClient, Completion
from everystop_lab.service import serving

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

NUM_PROMPTS = 32
MAX_TOKENS = 20
QUESTIONS = [
    "The capital of France is",
    "Once upon a time there was a",
    "def add(a, b):\n    return",
    "Water boils at",
    "The three primary colors are",
    "Roses are red, violets are",
    "To make a cup of tea, first",
    "1, 1, 2, 3, 5, 8, 13,",
]

# Small enough that the answers can't all grow in it, large enough that several prompts fit.
TIGHT_POOL = ["--num-blocks=72", "--max-model-len=512"]
CHUNKS = ["--max-prefill-chunk=48", "--max-num-batched-tokens=160", "--max-num-seqs=32"]


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Real English of mixed length: questions, and passages of 40 to 1,200 characters from the licence."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    lengths = [40 + 50 * index for index in range(NUM_PROMPTS - len(QUESTIONS))]
    return QUESTIONS + [text[300 * index :][:length].strip() for index, length in enumerate(lengths)]


@torch.inference_mode()
@pytest.mark.timeout(600)
def test_every_token_is_what_transformers_generates(
    prompts: list[str], model_dir: Path, tokenizer: Tokenizer, reference_model: LlamaForCausalLM
) -> None:
    async def ask_all_at_once() -> tuple[list[Completion], int]:
        flags = [f"--model={model_dir}", "--dtype=float32", *TIGHT_POOL, *CHUNKS]
        async with serving(flags) as address, AsyncClient(address) as client:
            answers = await asyncio.gather(
                *[
                    client.complete(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
                    for prompt in prompts
                ]
            )
            status = await client.get_status()
        assert status.blocks.num_used_blocks == 0
        return answers, status.counters.num_preemptions

    answers, num_preemptions = asyncio.run(ask_all_at_once())
    assert num_preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        generated = reference_model.generate(
            torch.tensor([tokenizer.encode(prompt).ids]), max_new_tokens=MAX_TOKENS, min_new_tokens=MAX_TOKENS,
            do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        expected = generated.sequences[0, -MAX_TOKENS:]
        assert list(answer.token_ids) == expected.tolist()
        assert answer.text == tokenizer.decode(expected.tolist())
        logprobs = torch.stack(generated.logits)[:, 0].log_softmax(-1)[torch.arange(MAX_TOKENS), expected]
        assert torch.allclose(torch.tensor([row.logprob for row in answer.logprobs]), logprobs, rtol=0, atol=1e-4)
