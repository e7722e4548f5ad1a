"""Turns what a caller says into request messages. Both clients build theirs here.

What is left out, or None, is not sent: the scheduler fills in its default. A zero that is given is sent as a zero.
Ranges are the scheduler's to check; only what a message cannot hold at all (a negative count, broken Unicode) is
refused here, with the same typed error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from everystop.errors import invalid
from everystop.scheduler.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    """"system", "user", "assistant" or another role that the model's chat template knows."""
    content: str


Prompt = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, str]]
"""Text, token ids, or a conversation (messages as `ChatMessage` or as `{"role": …, "content": …}`)."""


class GenerateOptions(TypedDict, total=False):
    """How to answer a prompt; `docs/api.md` has the meaning, range and default of each."""

    # SamplingParams
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    banned_token_ids: Sequence[int] | None
    # StopConditions
    max_tokens: int | None
    min_tokens: int | None
    stop_strings: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop: bool | None
    # OutputOptions
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool | None
    # GenerateRequest
    request_id: str | None
    priority: int | None
    tenant: str | None
    # ChatPrompt
    add_generation_prompt: bool | None


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Build the message. Raises ServiceError for a value that it cannot hold, TypeError for an unknown option."""
    request = _with_prompt(pb.GenerateRequest(), prompt, options.get("add_generation_prompt"))
    parts: dict[str, Message] = {
        "sampling.": request.sampling,
        "stop.": request.stop,
        "output.": request.output,
        "": request,
    }
    for name, value in options.items():
        if name not in GenerateOptions.__annotations__:
            raise TypeError(f"unknown option {name!r}")
        for path, part in parts.items():
            if value is not None and name in part.DESCRIPTOR.fields_by_name:
                _set_field(part, name, value, path)
    return request


def tokenize_request(prompt: str | Sequence[ChatMessage | Mapping[str, str]]) -> pb.TokenizeRequest:
    """Build the message. Raises ServiceError for text that it cannot hold."""
    return _with_prompt(pb.TokenizeRequest(), prompt, add_generation_prompt=None)


def detokenize_request(token_ids: Sequence[int], skip_special_tokens: bool | None) -> pb.DetokenizeRequest:
    """Build the message. Raises ServiceError for a token id that it cannot hold."""
    request = pb.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
    _set_field(request, "token_ids", token_ids)
    return request


_RequestT = TypeVar("_RequestT", pb.GenerateRequest, pb.TokenizeRequest)


def _with_prompt(request: _RequestT, prompt: Prompt, add_generation_prompt: bool | None) -> _RequestT:
    if isinstance(prompt, bytes):  # a sequence of integers, but never meant as one
        raise TypeError("a prompt is text, token ids or chat messages, not bytes")
    if isinstance(prompt, str):
        _set_field(request, "text", prompt)
    elif len(prompt) and isinstance(prompt[0], ChatMessage | Mapping):
        request.chat.SetInParent()
        _set_field(request.chat, "add_generation_prompt", add_generation_prompt)
        for message in cast("Sequence[ChatMessage | Mapping[str, str]]", prompt):
            fields = message if isinstance(message, Mapping) else {"role": message.role, "content": message.content}
            if fields.keys() != {"role", "content"}:
                raise TypeError(f"a chat message has a role and a content, and no more: {sorted(fields)}")
            added = request.chat.messages.add()
            for name, value in fields.items():
                _set_field(added, name, value, path="chat.messages.")
    elif isinstance(request, pb.GenerateRequest):
        request.token_ids.SetInParent()  # an empty list is sent as one
        _set_field(request.token_ids, "ids", prompt, path="token_ids.")
    else:
        raise TypeError("only text and chat messages can be tokenized")
    return request


_HOLDS = {
    FieldDescriptor.TYPE_INT32: f"a whole number from {-(2**31)} to {2**31 - 1}",
    FieldDescriptor.TYPE_UINT32: f"a whole number from 0 to {2**32 - 1}",
    FieldDescriptor.TYPE_UINT64: f"a whole number from 0 to {2**64 - 1}",
    FieldDescriptor.TYPE_STRING: "valid Unicode",
    FieldDescriptor.TYPE_MESSAGE: f"token ids from 0 to {2**32 - 1}",  # logit_bias, a map
}


def _set_field(message: Message, name: str, value: Any, path: str = "") -> None:
    """Set a field, unless the value is None. `path` is what stands before its name in errors."""
    try:
        message.MergeFrom(type(message)(**{name: value}))
    except ValueError as error:
        holds = _HOLDS[message.DESCRIPTOR.fields_by_name[name].type]
        raise invalid(path + name, f"expected {holds}") from error
