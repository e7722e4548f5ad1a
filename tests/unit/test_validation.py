"""What a request is checked for that a served mock can't be wrong about."""

import dataclasses
import threading

import pytest
import tokenizers

from everystop.errors import ServiceError
from everystop.plan import ExecutorInfo, ModelInfo
from everystop.scheduler.v1 import inference_pb2 as pb
from executor_svc.mock.tokenizer import TURN_END_ID, VOCAB_SIZE, tokenizer_files
from scheduler_svc import validation
from scheduler_svc.executor_link import LinkLostError, _check_executor
from scheduler_svc.frontend.tokenizer import Tokenizer
from scheduler_svc.validation import ServedModel

MAX_MODEL_LEN = 100


def served(vocab_size: int = VOCAB_SIZE) -> ServedModel:
    model = ModelInfo("mock", "f", vocab_size, (TURN_END_ID,), "d")
    executor = ExecutorInfo(1, model, 16, 1000, MAX_MODEL_LEN, 8, 64, "mock", "none", "none")
    return ServedModel(executor, Tokenizer.from_files(tokenizer_files()), MAX_MODEL_LEN)


def chat(*contents: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(content=content) for content in contents]))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(text="a<|im_end|>b"), "text"),
        (pb.TokenizeRequest(text="a<|im_end|>b"), "text"),
        (chat("a"), "chat"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 258])), "token_ids.ids"),
    ],
)
async def test_tokens_that_only_the_tokenizer_has_are_refused_whatever_they_come_from(request_, field) -> None:
    """An added token beyond the rows of the model's head."""
    await validation.tokenize_prompt(request_, served())
    with pytest.raises(ServiceError) as caught:
        await validation.tokenize_prompt(request_, served(vocab_size=VOCAB_SIZE - 1))
    assert caught.value.field == field
    assert caught.value.message == f"{field}: has token id 258, the vocabulary ends at 257"


def test_an_executor_whose_end_is_not_in_its_vocabulary_is_refused() -> None:
    _check_executor(served().executor)
    executor = served(vocab_size=TURN_END_ID).executor
    with pytest.raises(LinkLostError, match="eos_token_ids has 258, the vocabulary ends at 257"):
        _check_executor(executor)
    without_end = dataclasses.replace(executor, model=dataclasses.replace(executor.model, eos_token_ids=()))
    _check_executor(without_end)


@pytest.mark.parametrize("num_messages", [1, 4096])
async def test_many_messages_are_rendered_in_a_thread_though_they_are_empty(num_messages: int) -> None:
    threads = []

    class WatchedTokenizer(Tokenizer):
        def encode_chat(self, messages, **options):
            threads.append(threading.current_thread())
            return super().encode_chat(messages, **options)

    model = dataclasses.replace(served(), tokenizer=WatchedTokenizer.from_files(tokenizer_files()))
    await validation.tokenize_prompt(chat(*[""] * num_messages), model)
    (thread,) = threads
    assert (thread is threading.main_thread()) == (num_messages == 1)


async def test_a_text_that_can_never_fit_is_refused_without_reading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served()
    longest = "<|endoftext|>"
    assert (
        len(await validation.tokenize_prompt(pb.TokenizeRequest(text=longest * MAX_MODEL_LEN), model)) == MAX_MODEL_LEN
    )
    monkeypatch.setattr(model.tokenizer, "encode", None)
    with pytest.raises(ServiceError, match=r"has 1301 characters, at most 1300 can fit") as caught:
        await validation.tokenize_prompt(pb.TokenizeRequest(text=longest * MAX_MODEL_LEN + "x"), model)
    assert caught.value.field == "text"


@pytest.mark.parametrize(
    "loosen",
    [
        lambda backend: setattr(backend, "normalizer", tokenizers.normalizers.Strip()),
        lambda backend: setattr(backend, "pre_tokenizer", tokenizers.pre_tokenizers.Whitespace()),
        lambda backend: setattr(
            backend,
            "pre_tokenizer",
            tokenizers.pre_tokenizers.Sequence(
                [tokenizers.pre_tokenizers.Split(" ", "removed"), tokenizers.pre_tokenizers.ByteLevel()]
            ),
        ),
        lambda backend: setattr(backend, "model", tokenizers.models.BPE(vocab={"a": 0}, merges=[])),
        lambda backend: backend.add_tokens([tokenizers.AddedToken("<x>", lstrip=True)]),
    ],
)
async def test_a_text_that_may_shrink_is_read_whatever_its_length(loosen) -> None:
    files = tokenizer_files()
    backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    assert Tokenizer.from_files(files).max_token_bytes == len("<|endoftext|>")
    loosen(backend)
    assert Tokenizer.from_files(files | {"tokenizer.json": backend.to_str().encode()}).max_token_bytes is None
