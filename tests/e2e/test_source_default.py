"""The default model is SmolLM2-135M-Instruct: its tokenizer gives the known ids, and its answers are the known ones."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

# From the tokenizer that the model was published with.
KNOWN_IDS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Once upon a time": [6403, 1980, 253, 655],
    "def add(a, b): return": [1604, 803, 24, 81, 28, 278, 727, 1003],
    "In 2026, the weather": [788, 216, 34, 32, 34, 38, 28, 260, 3947],
    "Hello world, this is": [19556, 905, 28, 451, 314],
    "She walked into the": [8113, 13197, 618, 260],
    "The quick brown fox": [504, 2365, 6354, 16438],
}
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


def generate(model: "LlamaForCausalLM", prompt_ids: list[int], max_tokens: int) -> list[int]:
    """The greedy answer of transformers, end of sequence included."""
    import torch

    prompt = torch.tensor([prompt_ids])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=max_tokens)
    answer: list[int] = output[0, len(prompt_ids) :].tolist()
    return answer


@pytest.mark.parametrize("text", KNOWN_IDS)
def test_known_ids(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(text).ids == KNOWN_IDS[text]


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("x 1234567").tokens == ["x", "Ġ", "1", "2", "3", "4", "5", "6", "7"]


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is 1234567, isn't it?",
        "👩‍👩‍👧 zusammen 😀🏳️‍🌈",
        "สวัสดีชาวโลก ๑๒๓",
        "def f(x):\n\tif x  >= 2**10:\n        return [x]\r\n",
        " leading, trailing and\u00a0other spaces \n\n",
        "\x00\x7f\ufffd",
    ],
)
def test_text_comes_back_whole(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>").ids == [0, 1, 2]
    assert tokenizer.decode([0, 1, 504, 2], skip_special_tokens=True) == "The"
    assert tokenizer.get_vocab_size() == 49152


def test_chat_template_renders_the_known_prompt(model_dir: Path) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = ImmutableSandboxedEnvironment().from_string((model_dir / "chat_template.jinja").read_text())
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    assert template.render(messages=messages, add_generation_prompt=True) == CHAT


def test_it_says_paris(reference_model: "LlamaForCausalLM", tokenizer: Tokenizer) -> None:
    answer = generate(reference_model, tokenizer.encode("The capital of France is").ids, 4)
    assert tokenizer.decode(answer).startswith(" Paris")


def test_it_answers_a_chat_and_ends_its_turn(reference_model: "LlamaForCausalLM", tokenizer: Tokenizer) -> None:
    answer = generate(reference_model, tokenizer.encode(CHAT).ids, 16)
    assert tokenizer.decode(answer, skip_special_tokens=False) == "The capital of France is Paris.<|im_end|>"


def test_head_is_tied(reference_model: "LlamaForCausalLM") -> None:
    assert reference_model.lm_head.weight.data_ptr() == reference_model.model.embed_tokens.weight.data_ptr()
