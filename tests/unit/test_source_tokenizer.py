"""Tokenizers from GGUF metadata: how each scheme splits text, special tokens, and SentencePiece against a slow twin."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import pytest
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from everystop.errors import ServiceError
from executor_svc.model.gguf_file import GgufFile
from executor_svc.model.gguf_tokenizer import TokenizerParts, tokenizer_parts

Build = Callable[..., TokenizerParts]
Token = tuple[str, TokenType]

BYTES = [(symbol, TokenType.NORMAL) for symbol in sorted(pre_tokenizers.ByteLevel.alphabet())]
CONTROL = [("<|start|>", TokenType.CONTROL), ("<|end|>", TokenType.CONTROL)]


def read_back(
    path: Path, tokens: Sequence[Token], scores: Sequence[float] | None, merges: Sequence[str], **values: object
) -> TokenizerParts:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([token_type for _, token_type in tokens])
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_token_merges(merges)
    for key, value in values.items():
        kind = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, str: gguf.GGUFValueType.STRING}[
            type(value)
        ]
        writer.add_key_value(f"tokenizer.ggml.{key}", value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tokenizer_parts(GgufFile(path))


@pytest.fixture
def byte_pair(tmp_path: Path) -> Build:
    """Builds a byte-level tokenizer: control tokens 0 and 1, the bytes, then `more`."""

    def build(more: Sequence[Token] = (), merges: Sequence[str] = (), **values: object) -> TokenizerParts:
        values = {"model": "gpt2", "bos_token_id": 0, "eos_token_id": 1} | values
        return read_back(tmp_path / "tokenizer.gguf", [*CONTROL, *BYTES, *more], None, merges, **values)

    return build


TEXT = "It's 1234 o'clock  IN fooBar-Café\n\n\tx"
WORDS = {
    "gpt-2": "It|'s| 1234| o|'|clock| | IN| fooBar|-|Café|\n\n|\t|x",
    "smollm": "It|'s| |1|2|3|4| o|'|clock| | IN| fooBar|-|Café|\n\n|\t|x",
    "llama-bpe": "It|'s| |123|4| o|'clock| | IN| fooBar|-Café|\n\n|\tx",
    "qwen2": "It|'s| |1|2|3|4| o|'clock| | IN| fooBar|-Café|\n\n|\tx",
    "tekken": "It|'s| |1|2|3|4| o|'clock| | IN| foo|Bar|-Café|\n\n|\tx",
}


@pytest.mark.parametrize("scheme", WORDS)
def test_text_is_split_into_words(scheme: str, byte_pair: Build) -> None:
    tokenizer = byte_pair(pre=scheme).tokenizer
    words = tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in words] == WORDS[scheme].split("|")


@pytest.mark.parametrize("scheme", WORDS)
def test_any_text_comes_back(scheme: str, byte_pair: Build) -> None:
    tokenizer = byte_pair(pre=scheme).tokenizer
    for text in ("", " ", TEXT, "สวัสดี 👩‍👩‍👧 العربية", "\x00\x7f\u2028"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(("scheme", "ids"), [("llama-bpe", [258]), ("tekken", [258]), ("gpt-2", [259, 260])])
def test_whole_words_in_the_vocabulary_beat_the_merges_where_the_scheme_says_so(
    scheme: str, ids: list[int], byte_pair: Build
) -> None:
    more = [("abcd", TokenType.NORMAL), ("ab", TokenType.NORMAL), ("cd", TokenType.NORMAL)]
    tokenizer = byte_pair(more, ["a b", "c d"], pre=scheme).tokenizer
    assert tokenizer.encode("abcd", add_special_tokens=False).ids == ids


def test_only_qwen2_composes_characters(byte_pair: Build) -> None:
    assert byte_pair(pre="qwen2").tokenizer.encode("e\u0301").tokens == ["Ã", "©"]
    assert byte_pair(pre="llama-bpe").tokenizer.encode("e\u0301", add_special_tokens=False).tokens == ["e", "Ì", "ģ"]


@pytest.mark.parametrize(
    ("values", "before", "behind"),
    [
        ({"pre": "smollm"}, [], []),
        ({"pre": "llama-bpe"}, [0], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"pre": "smollm", "add_bos_token": True, "add_eos_token": True}, [0], [1]),
    ],
)
def test_ends_of_a_text(values: dict[str, object], before: list[int], behind: list[int], byte_pair: Build) -> None:
    tokenizer = byte_pair(**values).tokenizer
    plain = tokenizer.encode("x", add_special_tokens=False).ids
    assert tokenizer.encode("x").ids == [*before, *plain, *behind]


def test_marked_tokens_are_found_whole_and_only_control_tokens_are_special(byte_pair: Build) -> None:
    tokenizer = byte_pair([("<tool>", TokenType.USER_DEFINED)], pre="smollm").tokenizer
    ids = tokenizer.encode("<|start|>a<tool><|end|>").ids
    assert [tokenizer.id_to_token(token_id) for token_id in ids] == ["<|start|>", "a", "<tool>", "<|end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>"
    assert tokenizer.get_vocab_size() == 259


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"pre": "default"},
            "pre-tokenizer 'default' is unknown, .* supported: gpt-2, smollm, llama-bpe, qwen2, tekken",
        ),
        ({}, "pre-tokenizer '' is unknown"),
        ({"model": "t5"}, "tokenizer t5 is not supported"),
        ({"pre": "smollm", "merges": ["a b"]}, "vocabulary and merges do not belong together"),
    ],
)
def test_what_is_not_known_is_refused(values: dict[str, object], message: str, byte_pair: Build) -> None:
    with pytest.raises(ServiceError, match=message):
        byte_pair(**values)


SPACES = "\u2581"  # how SentencePiece writes a space
PIECES = [
    "ab",
    f"{SPACES}a",
    f"{SPACES}{SPACES}",
    "abc",
    f"{SPACES}ab",
    "ca",
    f"{SPACES}{SPACES}{SPACES}{SPACES}",
    "bb",
]
PIECES += ["bbb", f"{SPACES}abc", "é", SPACES, "a", "b", "c"]
UNKNOWN = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
BYTE_PIECES = [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]


def sentence_piece(path: Path, **values: object) -> TokenizerParts:
    tokens = [*UNKNOWN, *BYTE_PIECES, *((piece, TokenType.NORMAL) for piece in PIECES)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))]
    ids: dict[str, object] = {"model": "llama", "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return read_back(path, tokens, scores, [], **(ids | values))


def slow_sentence_piece(text: str) -> list[str]:
    """Merge the neighbours that make the best piece, the leftmost of equals, until none do; then bytes for the rest."""
    symbols = list(SPACES + text.replace(" ", SPACES)) if text else []
    while True:
        candidates = [
            (PIECES.index(left + right), at)
            for at, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in PIECES
        ]
        if not candidates:
            break
        _, at = min(candidates)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        token
        for symbol in symbols
        for token in ([symbol] if symbol in PIECES else [f"<0x{byte:02X}>" for byte in symbol.encode()])
    ]


def test_sentence_piece_equals_its_slow_twin(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path / "tokenizer.gguf").tokenizer

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.text(alphabet="ab c é😀", max_size=24))
    def check(text: str) -> None:
        encoded = tokenizer.encode(text)
        assert encoded.tokens == ["<s>", *slow_sentence_piece(text)]
        assert tokenizer.decode(encoded.ids) == text

    check()


def test_sentence_piece_without_space_in_front(tmp_path: Path) -> None:
    tokenizer = sentence_piece(tmp_path / "tokenizer.gguf", add_space_prefix=False, add_bos_token=False).tokenizer
    encoded = tokenizer.encode("ab ab")
    assert encoded.tokens == ["ab", f"{SPACES}ab"]
    assert tokenizer.decode(encoded.ids) == "ab ab"
