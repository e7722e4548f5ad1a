"""The tokenizer in a GGUF file to a `tokenizers.Tokenizer`.

GGUF keeps the vocabulary and merges, but of what happens to the text before them only a name (`tokenizer.ggml.pre`).
The table below knows what the names stand for. A name that it does not know is refused: with the wrong splits a model
still answers, only worse, and nobody would notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from executor_svc.model.gguf_file import GgufFile

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BytePairScheme:
    """What a name in `tokenizer.ggml.pre` stands for."""

    split: str | None = None
    """How text is cut into words; None: GPT-2's way, which is built into the byte level."""
    digits_alone: bool = False
    """Every digit is a word of its own, before anything else."""
    ignore_merges: bool = False
    """A word that is in the vocabulary is that token, whatever the merges would make of it."""
    adds_bos: bool = False
    """Where the file doesn't say."""
    nfc: bool = False


_BYTE_PAIR_SCHEMES = {
    "gpt-2": _BytePairScheme(),
    "smollm": _BytePairScheme(digits_alone=True),
    "llama-bpe": _BytePairScheme(split=_LLAMA3_SPLIT, ignore_merges=True, adds_bos=True),
    "qwen2": _BytePairScheme(split=_QWEN2_SPLIT, nfc=True),
    "tekken": _BytePairScheme(split=_TEKKEN_SPLIT, ignore_merges=True, adds_bos=True),
}


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer, and what a Hugging Face folder keeps beside it."""

    tokenizer: Tokenizer
    config: dict[str, object]
    """Content of tokenizer_config.json."""
    chat_template: str
    """Jinja source; empty when the model has none."""
    bos_token_id: int | None
    eos_token_ids: list[int]
    """Each of them ends an answer: end of text, and end of turn where the model tells them apart."""
    pad_token_id: int | None


def tokenizer_parts(file: GgufFile) -> TokenizerParts:
    """The tokenizer of `file`. Raises ServiceError INVALID_ARGUMENT for a kind that is not known."""
    tokens = file.get_list("tokenizer.ggml.tokens", str)
    kind = file.get("tokenizer.ggml.model", str)
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_pair(file, tokens)
    elif kind == "llama":
        tokenizer, adds_bos = _sentence_piece(file, tokens)
    else:
        raise file.error(f"tokenizer {kind} is not supported; supported: gpt2, llama")
    _add_marked_tokens(tokenizer, tokens, _token_types(file, tokens))
    named_ids = {name: _special_id(file, name, len(tokens)) for name in ("bos", "eos", "eot", "unknown", "padding")}
    _add_ends(tokenizer, file, tokens, named_ids, adds_bos)
    eos_token_ids = dict.fromkeys(token_id for name in ("eos", "eot") if (token_id := named_ids[name]) is not None)
    return TokenizerParts(
        tokenizer=tokenizer,
        config=_tokenizer_config(tokens, named_ids, file.get(f"{file.architecture}.context_length", int)),
        chat_template=file.get("tokenizer.chat_template", str, ""),
        bos_token_id=named_ids["bos"],
        eos_token_ids=list(eos_token_ids),
        pad_token_id=named_ids["padding"],
    )


def _byte_pair(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """A byte-level BPE tokenizer, and whether it puts BOS first where the file doesn't say."""
    name = file.get("tokenizer.ggml.pre", str, "")
    scheme = _BYTE_PAIR_SCHEMES.get(name)
    if scheme is None:
        known = ", ".join(_BYTE_PAIR_SCHEMES)
        raise file.error(f"pre-tokenizer {name!r} is unknown, so text could be split wrongly; supported: {known}")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [
        (left, right) for left, _, right in (m.partition(" ") for m in file.get_list("tokenizer.ggml.merges", str))
    ]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=scheme.ignore_merges))
    except Exception as error:  # what the library itself raises
        raise file.error(f"vocabulary and merges do not belong together ({error})") from error
    if scheme.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if scheme.digits_alone:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if scheme.split is not None:
        steps.append(pre_tokenizers.Split(Regex(scheme.split), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=scheme.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, scheme.adds_bos


def _sentence_piece(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """A SentencePiece BPE tokenizer (Llama 2, Mistral 7B), and whether it puts BOS first where the file doesn't say.

    It has scores in place of merges, writes spaces as "▁", and falls back to bytes.
    """
    scores = file.get_list("tokenizer.ggml.scores", float)
    types = _token_types(file, tokens)
    if len(scores) != len(tokens):
        raise file.error(f"has {len(tokens)} tokens but {len(scores)} scores")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    pieces = {token for token, token_type in zip(tokens, types, strict=True) if token_type == TokenType.NORMAL}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    # The best score first. Of equals the longest left side, which is what SentencePiece, merging from the left, arrives
    # at in runs of one character; the words themselves then make the order the same everywhere.
    merges.sort(key=lambda merge: (-scores[vocab[merge[0] + merge[1]]], -len(merge[0]), merge))
    unknown_id = _special_id(file, "unknown", len(tokens))
    unknown = None if unknown_id is None else tokens[unknown_id]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces_in = normalizers.Replace(" ", "▁")
    spaces_out = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces_in])
        tokenizer.decoder = decoders.Sequence([*spaces_out, decoders.Strip(content=" ", left=1, right=0)])
    else:
        tokenizer.normalizer = spaces_in
        tokenizer.decoder = decoders.Sequence(spaces_out)
    return tokenizer, True


def _token_types(file: GgufFile, tokens: list[str]) -> list[int]:
    types = file.get_list("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise file.error(f"has {len(tokens)} tokens but {len(types)} token types")
    return types


def _special_id(file: GgufFile, name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if not file.has(key):
        return None
    token_id = file.get(key, int)
    if not 0 <= token_id < num_tokens:
        raise file.error(f"{key} is {token_id}, but there are {num_tokens} tokens")
    return token_id


def _add_marked_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are found in text as they stand, before it is split; the control tokens among them are special."""
    control = {TokenType.CONTROL, TokenType.UNKNOWN}
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in control or token_type == TokenType.USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=token_type in control, normalized=False)])


def _add_ends(
    tokenizer: Tokenizer, file: GgufFile, tokens: list[str], named_ids: dict[str, int | None], adds_bos: bool
) -> None:
    """Put BOS before and EOS behind every text, where the model wants them."""
    before: list[str] = []
    behind: list[str] = []
    special_tokens: list[tuple[str, int]] = []
    for name, default, side in (("bos", adds_bos, before), ("eos", False, behind)):
        token_id = named_ids[name]
        if token_id is not None and file.get(f"tokenizer.ggml.add_{name}_token", bool, default):
            side.append(tokens[token_id])
            special_tokens.append((tokens[token_id], token_id))
    if special_tokens:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *behind],
            pair=[*before, "$A", *behind, *before, "$B", *behind],
            special_tokens=special_tokens,
        )


def _tokenizer_config(tokens: list[str], named_ids: dict[str, int | None], max_length: int) -> dict[str, object]:
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    for field, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = named_ids[name]
        config[f"{field}_token"] = None if token_id is None else tokens[token_id]
    return config
