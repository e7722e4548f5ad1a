"""The model's tokenizer, made from the files that the executor sends. No torch, no transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import grpc
import tokenizers

from everystop.errors import Reason, ServiceError, invalid
from scheduler_svc.frontend.byte_level import ByteLevelDecoding
from scheduler_svc.frontend.chat import ChatTemplate, choose_template
from scheduler_svc.frontend.detokenizer import Decoding, Detokenizer
from scheduler_svc.frontend.pieces import PieceDecoding, piece_rules
from scheduler_svc.frontend.token_lengths import max_token_bytes

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to token ids and back. Safe to use from several threads; encoding and decoding let go of the GIL."""

    def __init__(
        self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None
    ) -> None:
        """`special_tokens` by name, such as `bos_token`. Takes `backend` over; nobody may change it afterwards."""
        # One prompt is one unit of work: the library's own thread pool would only compete with the caller's threads. It
        # offers no other switch than this one, which it reads at every call.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        backend.no_truncation()
        backend.no_padding()
        _mark_special(backend, special_tokens.values())
        self._backend = backend
        self._vocab_size = max(backend.get_vocab().values(), default=-1) + 1
        description = json.loads(backend.to_str())
        self._decoding = _decoding(backend, self._vocab_size, description)
        self._max_token_bytes = max_token_bytes(description, map(self._decoding.token_bytes, range(self._vocab_size)))
        self._chat_template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """Load `tokenizer.json` and, where there are such files, tokenizer_config.json, special_tokens_map.json and
        chat_template.jinja, which counts before a template in tokenizer_config.json.

        Raises FAILED_PRECONDITION when they make no tokenizer, or one whose text can't be streamed.
        """
        try:
            backend = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
            config = json.loads(files.get("tokenizer_config.json", b"{}"))
            special_tokens_map = json.loads(files.get("special_tokens_map.json", b"{}"))
            template_file = files.get("chat_template.jinja")
            template = choose_template(config.get("chat_template")) if template_file is None else template_file.decode()
            # The old file of special tokens counts only where tokenizer_config.json doesn't have them in the new form.
            named = config if "added_tokens_decoder" in config else config | special_tokens_map
            return cls(backend, _special_tokens(named), template)
        except ServiceError:
            raise
        except Exception as error:  # the library raises bare exceptions; all of them mean the same
            raise _unusable(f"{type(error).__name__}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; the model may have room for more."""
        return self._vocab_size

    @property
    def max_token_bytes(self) -> int | None:
        """The most bytes of a text that one token stands for; None when there may be no limit."""
        return self._max_token_bytes

    @property
    def chat_template(self) -> str | None:
        """The jinja source, if the model has one."""
        return None if self._chat_template is None else self._chat_template.source

    def encode(self, text: str) -> list[int]:
        """Encode a prompt with the special tokens that the model usually gets around it, such as a BOS.

        Special tokens that are written out in the text become those tokens, as in transformers.
        """
        return self._encode(text, add_special_tokens=True, field="text")

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> list[int]:
        """Render `messages` (each with `role` and `content`) and encode the result.

        The template writes the special tokens itself, so none are added.
        """
        if self._chat_template is None:
            raise invalid("chat", "the model has no chat template; send text or token_ids instead")
        prompt = self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)
        return self._encode(prompt, add_special_tokens=False, field="chat.messages")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode all ids at once. Ids that the tokenizer lacks have no text; they must fit into 32 bits."""
        return self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for in the middle of a text; none for an id that the tokenizer lacks."""
        return self._decoding.token_bytes(token_id)

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """Start an answer, which is decoded as its tokens come."""
        return self._decoding.detokenizer(skip_special_tokens)

    def _encode(self, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise invalid(field, f"not valid Unicode: a lone surrogate at character {error.start}") from error
        try:
            # NOTE: of the library's ways to encode, only those for batches let go of the GIL.
            encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except Exception as error:  # the library raises bare exceptions, such as for a character without a token
            raise invalid(field, f"the model's tokenizer refuses it: {error}") from error
        return list(encoding.ids)


def _unusable(message: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION, Reason.INTERNAL, f"the model's tokenizer can't be used: {message}"
    )


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """The special tokens by name; a value is the token, or an object with its `content`."""
    values = {name: config.get(name) for name in _SPECIAL_TOKEN_NAMES}
    contents = {name: value["content"] if isinstance(value, Mapping) else value for name, value in values.items()}
    return {name: str(content) for name, content in contents.items() if content is not None}


def _mark_special(backend: tokenizers.Tokenizer, contents: Iterable[str]) -> None:
    """Make sure that named special tokens which the vocabulary has are special to the backend, as transformers does."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [content for content in contents if content not in special and backend.token_to_id(content) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False) for content in missing])


def _decoding(backend: tokenizers.Tokenizer, vocab_size: int, description: Mapping[str, Any]) -> Decoding:
    tokens = [backend.id_to_token(token_id) for token_id in range(vocab_size)]
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    special_ids = frozenset(token_id for token_id, token in enumerate(tokens) if token in special)
    steps = _decoder_steps(description["decoder"])
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return ByteLevelDecoding(tokens, special_ids)
    rules = piece_rules(steps)
    if rules is None:
        raise _unusable(f"its decoder is not known to stream: {', '.join(str(step['type']) for step in steps)}")
    return PieceDecoding(tokens, special_ids, backend.decoder, rules)


def _decoder_steps(decoder: Mapping[str, object] | None) -> list[Mapping[str, object]]:
    """The steps of a decoder's JSON in order, sequences unfolded; none when there is no decoder."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    nested = decoder["decoders"]
    assert isinstance(nested, list)
    return [step for entry in nested for step in _decoder_steps(entry)]
