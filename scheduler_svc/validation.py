"""From a `GenerateRequest` to a checked `Generation`: bad input ends here, in an error that names field and limit."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from everystop.errors import invalid
from everystop.plan import ExecutorInfo, SamplingParams
from everystop.scheduler.v1 import inference_pb2 as pb
from scheduler_svc import limits
from scheduler_svc.core.request import Request
from scheduler_svc.frontend.answer import AnswerText
from scheduler_svc.frontend.tokenizer import Tokenizer
from scheduler_svc.resume import replay
from scheduler_svc.text_work import TEXT_WORK

_SEED_BITS = 53
"""Of a seed that the server draws: what every client can hold exactly, JavaScript's numbers included."""

_MESSAGE_LENGTH = 32
"""Characters that each chat message counts as beside its own: an empty one is work for the template, too."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model being served: what its executor told, its tokenizer, and the lengths that both sides allow."""

    executor: ExecutorInfo
    tokenizer: Tokenizer
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Generation:
    """A checked request: the core's part and the frontend's part."""

    request: Request
    answer: AnswerText
    """The text so far: empty, or that of the tokens which a resumed answer begins with."""
    has_ended: bool
    """Whether those tokens are the whole answer."""


async def check(message: pb.GenerateRequest, model: ServedModel) -> Generation:
    """Check everything and tokenize the prompt. Raises ServiceError INVALID_ARGUMENT."""
    request_id = _check_request_id(message)
    if len(message.tenant) > limits.MAX_TENANT_LENGTH:
        raise invalid("tenant", f"has {len(message.tenant)} characters, at most {limits.MAX_TENANT_LENGTH}")
    _check_stop(message.stop, model)
    _check_sampling(message.sampling, model)
    for name in ("logprobs", "prompt_logprobs"):
        _check_range(f"output.{name}", getattr(message.output, name), 0, limits.MAX_LOGPROBS)
    prompt_token_ids = await tokenize_prompt(message, model)
    max_tokens = _check_lengths(message.stop, len(prompt_token_ids), model)
    _check_resume(message, max_tokens, model)
    eos_token_ids = frozenset() if message.stop.ignore_eos else frozenset(model.executor.model.eos_token_ids)
    stop_token_ids = frozenset(message.stop.stop_token_ids)
    _check_choice(message, eos_token_ids | stop_token_ids, model)
    request = Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_resolve_sampling(message, eos_token_ids | stop_token_ids),
        max_tokens=max_tokens,
        eos_token_ids=eos_token_ids,
        stop_token_ids=stop_token_ids,
        priority=message.priority,
        tenant=message.tenant,
        answer_token_ids=list(message.resume.token_ids),
    )
    answer = AnswerText(
        model.tokenizer,
        skip_special_tokens=_or(message.output, "skip_special_tokens", default=True),
        stop_strings=message.stop.stop_strings,
        include_stop=message.stop.include_stop,
    )
    return Generation(request, answer, has_ended=await replay(request, answer))


async def tokenize_prompt(message: pb.GenerateRequest | pb.TokenizeRequest, model: ServedModel) -> list[int]:
    """Token ids of the prompt, at least one, all in the model's vocabulary. Raises ServiceError INVALID_ARGUMENT."""
    kind = message.WhichOneof("prompt")
    tokenizer = model.tokenizer
    if kind == "text":
        _check_length("text", len(message.text))
        _check_fits(message.text, model)
        token_ids = await TEXT_WORK.do(len(message.text), lambda: tokenizer.encode(message.text))
    elif kind == "chat":
        messages = [{"role": turn.role, "content": turn.content} for turn in message.chat.messages]
        if not 1 <= len(messages) <= limits.MAX_CHAT_MESSAGES:
            raise invalid("chat.messages", f"has {len(messages)}, expected 1 to {limits.MAX_CHAT_MESSAGES}")
        num_characters = sum(len(turn["role"]) + len(turn["content"]) + _MESSAGE_LENGTH for turn in messages)
        _check_length("chat.messages", num_characters)
        opens_turn = _or(message.chat, "add_generation_prompt", default=True)
        token_ids = await TEXT_WORK.do(
            num_characters, lambda: tokenizer.encode_chat(messages, add_generation_prompt=opens_turn)
        )
    elif kind == "token_ids" and isinstance(message, pb.GenerateRequest):
        _check_prompt_length(len(message.token_ids.ids), model)
        token_ids = list(message.token_ids.ids)
    else:
        raise invalid("prompt", "is missing: set text, token_ids or chat")
    if not token_ids:
        raise invalid("prompt", "is empty: expected at least 1 token")
    # Text, too: a tokenizer may have added tokens that the model has no rows for.
    check_ids("token_ids.ids" if kind == "token_ids" else str(kind), token_ids, model.executor.model.vocab_size)
    return token_ids


def _check_request_id(message: pb.GenerateRequest) -> str:
    if not message.HasField("request_id"):
        return uuid.uuid4().hex
    request_id = message.request_id
    if not 1 <= len(request_id) <= limits.MAX_REQUEST_ID_LENGTH or not (
        request_id.isascii() and request_id.isprintable()
    ):
        raise invalid("request_id", f"expected 1 to {limits.MAX_REQUEST_ID_LENGTH} printable ASCII characters")
    return request_id


def _check_stop(stop: pb.StopConditions, model: ServedModel) -> None:
    vocab_size = model.executor.model.vocab_size
    check_count("stop.stop_strings", len(stop.stop_strings), limits.MAX_STOP_STRINGS)
    for index, text in enumerate(stop.stop_strings):
        _check_range(f"stop.stop_strings[{index}]", len(text), 1, limits.MAX_STOP_STRING_LENGTH, unit=" characters")
    check_count("stop.stop_token_ids", len(stop.stop_token_ids), limits.MAX_STOP_TOKEN_IDS)
    check_ids("stop.stop_token_ids", stop.stop_token_ids, vocab_size)
    if stop.HasField("max_tokens") and stop.max_tokens < 1:
        raise invalid("stop.max_tokens", "is 0, expected at least 1")


def _check_sampling(sampling: pb.SamplingParams, model: ServedModel) -> None:
    vocab_size = model.executor.model.vocab_size
    _check_range("sampling.temperature", sampling.temperature, 0, 100)
    _check_range("sampling.top_p", _or(sampling, "top_p", default=1.0), 0, 1, low_is_open=True)
    _check_range("sampling.min_p", sampling.min_p, 0, 1)
    penalty = _or(sampling, "repetition_penalty", default=1.0)
    _check_range("sampling.repetition_penalty", penalty, 0, 100, low_is_open=True)
    _check_range("sampling.presence_penalty", sampling.presence_penalty, -100, 100)
    _check_range("sampling.frequency_penalty", sampling.frequency_penalty, -100, 100)
    check_count("sampling.logit_bias", len(sampling.logit_bias), limits.MAX_LOGIT_BIAS)
    check_ids("sampling.logit_bias", sampling.logit_bias, vocab_size)
    for token_id, bias in sampling.logit_bias.items():
        _check_range(f"sampling.logit_bias[{token_id}]", bias, -100, 100)
    for name in ("allowed_token_ids", "banned_token_ids"):
        token_ids: Sequence[int] = getattr(sampling, name)
        check_count(f"sampling.{name}", len(token_ids), limits.MAX_TOKEN_LIST)
        check_ids(f"sampling.{name}", token_ids, vocab_size)
    banned = set(sampling.banned_token_ids)
    if (sampling.allowed_token_ids and banned.issuperset(sampling.allowed_token_ids)) or len(banned) == vocab_size:
        raise invalid("sampling.banned_token_ids", "leaves no token to choose from, expected at least 1")


def _check_choice(message: pb.GenerateRequest, end_token_ids: frozenset[int], model: ServedModel) -> None:
    """Before `min_tokens` no end may be chosen: something else must be left then."""
    excluded = end_token_ids.union(message.sampling.banned_token_ids)
    allowed = message.sampling.allowed_token_ids
    num_left = len(set(allowed) - excluded) if allowed else model.executor.model.vocab_size - len(excluded)
    if message.stop.min_tokens and not num_left:
        raise invalid(
            "stop.min_tokens",
            f"is {message.stop.min_tokens}, at most 0: of the tokens that may be chosen, each ends the answer",
        )


def _check_prompt_length(num_prompt_tokens: int, model: ServedModel) -> None:
    max_model_len = model.max_model_len
    if num_prompt_tokens >= max_model_len:
        raise invalid(
            "prompt",
            f"has {num_prompt_tokens} tokens, at most {max_model_len - 1} leave room for an answer"
            f" (max_model_len is {max_model_len})",
        )


def _check_lengths(stop: pb.StopConditions, num_prompt_tokens: int, model: ServedModel) -> int:
    """The answer's largest length: what was asked for, else what fits."""
    _check_prompt_length(num_prompt_tokens, model)
    max_model_len = model.max_model_len
    room = max_model_len - num_prompt_tokens
    max_tokens = _or(stop, "max_tokens", default=room)
    if max_tokens > room:
        raise invalid(
            "stop.max_tokens",
            f"is {max_tokens}, at most {room} fit behind a prompt of {num_prompt_tokens} tokens"
            f" (max_model_len is {max_model_len})",
        )
    if stop.min_tokens > max_tokens:
        raise invalid("stop.min_tokens", f"is {stop.min_tokens}, at most max_tokens, which is {max_tokens}")
    return int(max_tokens)


def _check_resume(message: pb.GenerateRequest, max_tokens: int, model: ServedModel) -> None:
    num_tokens = len(message.resume.token_ids)
    if num_tokens > max_tokens:
        raise invalid("resume.token_ids", f"has {num_tokens} tokens, at most max_tokens, which is {max_tokens}")
    check_ids("resume.token_ids", message.resume.token_ids, model.executor.model.vocab_size)
    is_drawn = _or(message.sampling, "temperature", default=1.0) != 0
    if num_tokens and is_drawn and not message.sampling.HasField("seed"):
        raise invalid(
            "sampling.seed", "is missing: an answer that isn't greedy resumes with the seed that it began with"
        )


def _resolve_sampling(message: pb.GenerateRequest, end_token_ids: frozenset[int]) -> SamplingParams:
    sampling, output = message.sampling, message.output
    # Those of the prompt come before the first token, so a client that has one has them all.
    reports_prompt = output.HasField("prompt_logprobs") and not message.resume.token_ids
    return SamplingParams(
        temperature=_or(sampling, "temperature", default=1.0),
        top_p=_or(sampling, "top_p", default=1.0),
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=_or(sampling, "repetition_penalty", default=1.0),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(_SEED_BITS),
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        banned_token_ids=tuple(sampling.banned_token_ids),
        min_tokens=message.stop.min_tokens,
        end_token_ids=tuple(sorted(end_token_ids)),
        num_logprobs=output.logprobs if output.HasField("logprobs") else None,
        num_prompt_logprobs=output.prompt_logprobs if reports_prompt else None,
    )


def _or(message: Message, name: str, *, default: Any) -> Any:
    """A field's value if it was sent, zero included; else the default."""
    return getattr(message, name) if message.HasField(name) else default


def _check_range(
    name: str, value: float, low: float, high: float, *, low_is_open: bool = False, unit: str = ""
) -> None:
    # NOTE: written so that NaN, which compares false with everything, is refused
    if (low < value if low_is_open else low <= value) and value <= high:
        return
    bounds = f"{'above ' if low_is_open else ''}{low} to {high}"
    raise invalid(name, f"is {value:g}{unit}, expected {bounds}")


def check_count(name: str, num_entries: int, max_entries: int) -> None:
    """Refuse a list that is too long. Raises ServiceError INVALID_ARGUMENT naming the field."""
    if num_entries > max_entries:
        raise invalid(name, f"has {num_entries} entries, at most {max_entries}")


def _check_length(name: str, num_characters: int) -> None:
    if num_characters > limits.MAX_TEXT_LENGTH:
        raise invalid(name, f"has {num_characters} characters, at most {limits.MAX_TEXT_LENGTH}")


def _check_fits(text: str, model: ServedModel) -> None:
    """Refuse at once what has more tokens than fit, however it is tokenized; a character has at least one byte."""
    max_token_bytes = model.tokenizer.max_token_bytes
    if max_token_bytes is not None and len(text) > max_token_bytes * model.max_model_len:
        raise invalid(
            "text",
            f"has {len(text)} characters, at most {max_token_bytes * model.max_model_len} can fit"
            f" (max_model_len is {model.max_model_len}, a token has at most {max_token_bytes})",
        )


def check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids outside of the vocabulary. Raises ServiceError INVALID_ARGUMENT naming the field."""
    largest = max(token_ids, default=0)  # there may be a million of them, and all others wait meanwhile
    if largest >= vocab_size:
        raise invalid(name, f"has token id {largest}, the vocabulary ends at {vocab_size - 1}")
