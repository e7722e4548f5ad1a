"""The tokenizer: what it takes in, what it refuses, and what it knows of single tokens."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from everystop.errors import ServiceError
from scheduler_svc.frontend import Tokenizer

BOS, END = 256, 257
MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}<end>{% endfor %}"


def byte_backend() -> tokenizers.Tokenizer:
    """One token per byte, `<bos>` before every prompt, `<end>` to write by hand."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<end>"])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return backend


def load(backend: tokenizers.Tokenizer | None = None, **files: object) -> Tokenizer:
    """`files` by stem; values that are no strings become JSON."""
    named = {"tokenizer.json": (backend or byte_backend()).to_str().encode()}
    for stem, content in files.items():
        if isinstance(content, str):
            named[f"{stem}.jinja"] = content.encode()
        else:
            named[f"{stem}.json"] = json.dumps(content).encode()
    return Tokenizer.from_files(named)


def test_encode_adds_the_usual_special_tokens_and_reads_written_ones() -> None:
    tokenizer = load()
    token_ids = tokenizer.encode("a<end>")
    assert token_ids[0] == BOS
    assert token_ids[-1] == END
    assert len(token_ids) == 3


def test_encode_chat_adds_no_second_bos() -> None:
    tokenizer = load(chat_template=TEMPLATE, tokenizer_config={"bos_token": "<bos>"})
    token_ids = tokenizer.encode_chat(MESSAGES, add_generation_prompt=True)
    assert token_ids.count(BOS) == 1
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<bos>hi<end>"


@pytest.mark.parametrize("text", ["", "\0", "a\0b", "สวัสดี 👩‍👩‍👧", "\u2028\ufeff\uffff", "x" * 1_000_000])
def test_any_text_comes_back(text: str) -> None:
    tokenizer = load()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_a_lone_surrogate_is_refused_by_name() -> None:
    with pytest.raises(ServiceError, match="character 2") as refusal:
        load().encode("ok\ud800")
    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.value.field == "text"
    with pytest.raises(ServiceError) as refusal:
        load(chat_template=TEMPLATE).encode_chat([{"role": "user", "content": "\udfff"}], add_generation_prompt=True)
    assert refusal.value.field == "chat.messages"


def test_a_text_that_has_no_tokens_is_refused_by_name() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="missing"))
    with pytest.raises(ServiceError, match="tokenizer refuses it") as refusal:
        load(backend).encode("b")
    assert refusal.value.field == "text"


def test_limits_in_the_file_do_not_cut_or_pad_prompts() -> None:
    backend = byte_backend()
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=64)
    assert len(load(backend).encode("abcdef")) == 7


def test_encoding_lets_other_threads_run() -> None:
    tokenizer = load()
    span: list[float] = []
    done = threading.Event()

    def encode() -> None:
        span.append(time.perf_counter())
        tokenizer.encode("the quick brown fox " * 50_000)
        span.append(time.perf_counter())
        done.set()

    ticks = []
    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):
        ticks.append(time.perf_counter())
    thread.join()
    assert sum(span[0] < tick < span[1] for tick in ticks) > 5


def test_encoding_starts_no_threads(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_backend().to_str())
    script = (
        "import pathlib, sys, psutil; from scheduler_svc.frontend import Tokenizer;"
        "tokenizer = Tokenizer.from_files({'tokenizer.json': pathlib.Path(sys.argv[1]).read_bytes()});"
        "before = psutil.Process().num_threads();"
        "tokenizer.encode('a b ' * 1000);"
        "sys.exit(psutil.Process().num_threads() - before)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    command = [sys.executable, "-c", script, str(tmp_path / "tokenizer.json")]
    assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == 0


def test_template_file_counts_before_the_config() -> None:
    config = {"chat_template": "from config"}
    assert load(tokenizer_config=config).chat_template == "from config"
    assert load(tokenizer_config=config, chat_template="from file").chat_template == "from file"
    assert load().chat_template is None


def test_of_named_templates_the_default_is_used() -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert load(tokenizer_config={"chat_template": named}).chat_template == "plain"
    assert load(tokenizer_config={"chat_template": named[:1]}).chat_template is None


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(ServiceError, match="no chat template") as refusal:
        load().encode_chat(MESSAGES, add_generation_prompt=True)
    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_named_special_tokens_come_from_either_file_and_form() -> None:
    old_form = {"bos_token": {"content": "<old>", "lstrip": False}}
    template = "{{ bos_token }}"
    assert load(chat_template=template, special_tokens_map=old_form).encode_chat(MESSAGES, add_generation_prompt=False)
    both = load(
        chat_template=template,
        special_tokens_map=old_form,
        tokenizer_config={"bos_token": "<end>", "added_tokens_decoder": {}},
    )
    assert both.encode_chat(MESSAGES, add_generation_prompt=False) == [END]
    older = load(chat_template=template, special_tokens_map=old_form, tokenizer_config={"bos_token": "<end>"})
    rendered = older.encode_chat(MESSAGES, add_generation_prompt=False)
    assert older.decode(rendered, skip_special_tokens=False) == "<old>"


def test_a_named_special_token_of_the_vocabulary_becomes_special() -> None:
    backend = byte_backend()
    backend.add_tokens(["<stop>"])
    plain, named = load(backend), load(backend, tokenizer_config={"eos_token": "<stop>", "pad_token": "<not there>"})
    assert plain.decode([258], skip_special_tokens=True) == "<stop>"
    assert named.decode([258], skip_special_tokens=True) == ""
    assert named.vocab_size == 259


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": b"{"},
        {"tokenizer.json": byte_backend().to_str().encode(), "tokenizer_config.json": b"\xff"},
    ],
)
def test_unusable_files_are_a_typed_error(files: dict[str, bytes]) -> None:
    with pytest.raises(ServiceError, match="can't be used") as refusal:
        Tokenizer.from_files(files)
    assert refusal.value.code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip("a", 1, 0)]),
    ],
)
def test_a_decoder_that_cannot_stream_is_refused_at_loading(decoder: decoders.Decoder) -> None:
    backend = byte_backend()
    backend.decoder = decoder
    with pytest.raises(ServiceError, match="not known to stream"):
        load(backend)


def test_token_bytes_of_byte_level_tokens() -> None:
    tokenizer = load()
    token_ids = tokenizer.encode("ก")[1:]
    assert [tokenizer.token_bytes(i) for i in token_ids] == [b"\xe0", b"\xb8", b"\x81"]
    assert tokenizer.token_bytes(END) == b"<end>"
    assert tokenizer.token_bytes(9999) == b""


def test_token_bytes_of_pieces() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"▁a": 0, "<0xE0>": 1, "c": 5}, unk_token="c"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = load(backend)
    assert [tokenizer.token_bytes(i) for i in (0, 1, 3, 5, 9)] == [b" a", b"\xe0", b"", b"c", b""]
    assert tokenizer.vocab_size == 6
