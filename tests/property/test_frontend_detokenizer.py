"""Streaming detokenizers: equal to decoding all at once, at a flat cost, for every kind of vocabulary."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from scheduler_svc.frontend import AnswerText, Tokenizer

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "▁▁", "▁a", "a", "▁a▁", "b", "##b", "##", ".", "é", "▁ก", "👍", " ", "do not", "n't", "\ufffd", "<s>"]


@dataclass(frozen=True, slots=True)
class Kind:
    tokenizer: Tokenizer
    byte_ids: list[int]
    """The token of each byte; empty when there are none."""


def byte_level() -> Kind:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    backend.add_tokens(["é plain ก", "éé"])  # the second happens to be written in the alphabet of bytes
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend, {}, None)
    return Kind(tokenizer, sorted(range(256), key=tokenizer.token_bytes))


def piecewise(*steps: decoders.Decoder, with_bytes: bool = False) -> Kind:
    tokens = PIECES + BYTE_TOKENS if with_bytes else PIECES
    backend = tokenizers.Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="a"))
    if steps:
        backend.decoder = decoders.Sequence(list(steps)) if len(steps) > 1 else steps[0]
    backend.add_special_tokens(["<s>"])
    return Kind(Tokenizer(backend, {}, None), list(range(len(PIECES), len(tokens))))


def spaces(*last: decoders.Decoder) -> Kind:
    return piecewise(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last, with_bytes=True)


KINDS = {
    "byte level": byte_level(),
    "Llama 2": spaces(decoders.Strip(" ", 1, 0)),
    "Gemma": spaces(),
    "three spaces stripped": spaces(decoders.Strip(" ", 3, 0)),
    "byte fallback alone": piecewise(decoders.ByteFallback(), with_bytes=True),
    "Metaspace": piecewise(decoders.Metaspace()),
    "Metaspace, nothing prepended": piecewise(decoders.Metaspace(prepend_scheme="never")),
    "Metaspace with bytes": piecewise(decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse(), with_bytes=True),
    "WordPiece": piecewise(decoders.WordPiece()),
    "WordPiece, no clean-up": piecewise(decoders.WordPiece(cleanup=False)),
    "no decoder": piecewise(),
}


def token_ids(kind: Kind) -> st.SearchStrategy[list[int]]:
    """Any ids, some unknown to the tokenizer, mixed with characters as bytes."""
    single = st.integers(0, kind.tokenizer.vocab_size + 2).map(lambda token_id: [token_id])
    piece = st.integers(0, len(PIECES)).map(lambda token_id: [token_id])
    chunks = [single, piece]
    if kind.byte_ids:
        as_bytes = st.text("a กé👍\ud7ff\U0010ffff", max_size=4).map(
            lambda text: [kind.byte_ids[b] for b in text.encode()]
        )
        chunks += [as_bytes, as_bytes.map(lambda ids: ids[:-1])]
    return st.lists(st.one_of(chunks), max_size=12).map(lambda parts: [i for part in parts for i in part])


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, derandomize=True, max_examples=250)
@given(values=st.data())
def test_parts_equal_the_whole_decoded_at_once(name: str, values: st.DataObject) -> None:
    kind = KINDS[name]
    ids = values.draw(token_ids(kind))
    skip_special_tokens = values.draw(st.booleans())
    cuts = sorted(values.draw(st.sets(st.integers(0, len(ids)), max_size=len(ids))))
    detokenizer = kind.tokenizer.detokenizer(skip_special_tokens)
    parts = [detokenizer.push(ids[start:end]) for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    parts.append(detokenizer.finish())
    assert "".join(parts) == kind.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(raw=st.lists(st.sampled_from(b"a\x80\xbf\xc0\xc2\xe0\xa0\xed\x9f\xef\xf0\x90\xf4\x8f\xf5\xff"), max_size=12))
def test_invalid_bytes_are_replaced_as_the_library_does(raw: list[int]) -> None:
    kind = KINDS["byte level"]
    ids = [kind.byte_ids[byte] for byte in raw]
    detokenizer = kind.tokenizer.detokenizer(skip_special_tokens=True)
    text = "".join([*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()])
    assert text == kind.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["สวัสดีครับ", "a👩‍👩‍👧‍👦b"])
def test_a_run_of_byte_tokens_waits_for_its_end(text: str) -> None:
    kind = KINDS["Gemma"]
    detokenizer = kind.tokenizer.detokenizer(skip_special_tokens=True)
    ids = [kind.byte_ids[byte] for byte in text.encode()]
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * len(ids)
    assert detokenizer.push([PIECES.index("a")]) == text + "a"


NUM_TOKENS, NUM_COMPARED = 60_000, 5_000

STREAMS: dict[str, Callable[[Kind], list[int]]] = {
    "invalid bytes": lambda kind: [kind.byte_ids[0x80]] if kind.byte_ids else [PIECES.index("\ufffd")],
    "beginnings of characters": lambda kind: [kind.byte_ids[0xF0]] if kind.byte_ids else [PIECES.index("##")],
    "special": lambda kind: [kind.tokenizer.vocab_size - 1 if kind is KINDS["byte level"] else PIECES.index("<s>")],
    "whitespace": lambda kind: [kind.byte_ids[0x20]] if kind.byte_ids else [PIECES.index("▁")],
    "one long run of Thai": lambda kind: [kind.byte_ids[b] for b in "ก".encode()] if kind.byte_ids else [0],
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", ["byte level", "Llama 2", "Metaspace"])
def test_the_last_token_costs_what_the_first_did(name: str, stream: str) -> None:
    kind = KINDS[name]
    period = STREAMS[stream](kind)
    # The last stop string is held back in part all the time, of the others there is never a trace.
    stop_strings = ["never", "\n\nUser:", kind.tokenizer.decode(period * 40, skip_special_tokens=True) + "!"]
    answer = AnswerText(kind.tokenizer, skip_special_tokens=True, stop_strings=stop_strings, include_stop=False)
    costs_ns = []
    for i in range(NUM_TOKENS):
        start = time.perf_counter_ns()
        answer.push([period[i % len(period)]])
        costs_ns.append(time.perf_counter_ns() - start)
    first, last = costs_ns[:NUM_COMPARED], costs_ns[-NUM_COMPARED:]
    assert statistics.median(last) < 3 * statistics.median(first)
