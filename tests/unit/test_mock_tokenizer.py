"""The mock's tokenizer files, read as any model's are."""

from __future__ import annotations

import json

import pytest
from jinja2 import Environment
from tokenizers import Tokenizer

from executor_svc.mock.tokenizer import END_OF_TEXT_ID, TURN_END_ID, TURN_START_ID, VOCAB_SIZE, tokenizer_files


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files()["tokenizer.json"].decode())


@pytest.mark.parametrize("text", ["Hello, world!\n\t ", "สวัสดี 🙂", "".join(chr(code) for code in range(0x100))])
def test_token_ids_are_the_bytes_and_decode_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text).ids
    assert token_ids == list(text.encode())
    assert tokenizer.decode(token_ids) == text


def test_every_byte_has_its_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    for byte in range(256):
        # A byte that is no character by itself decodes to the replacement character.
        assert tokenizer.decode([byte]) == bytes([byte]).decode(errors="replace")


def test_special_tokens_come_after_the_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>a<|im_end|><|endoftext|>").ids == [
        TURN_START_ID,
        ord("a"),
        TURN_END_ID,
        END_OF_TEXT_ID,
    ]
    assert tokenizer.decode([TURN_START_ID, ord("a"), TURN_END_ID]) == "a"


def test_the_chat_template_writes_turns() -> None:
    files = tokenizer_files()
    template = Environment(autoescape=True).from_string(files["chat_template.jinja"].decode())
    messages = [{"role": "user", "content": "Hi"}]
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages=messages, add_generation_prompt=True) == expected
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|im_end|>"
