"""Messages that the clients build: what is given is sent, zeros included; what is left out is not."""

from typing import Any

import grpc
import pytest

from everystop.client import ChatMessage, GenerateOptions
from everystop.client.requests import detokenize_request, generate_request, tokenize_request
from everystop.errors import Reason, ServiceError
from everystop.scheduler.v1 import inference_pb2 as pb

SCALARS_THAT_MAY_BE_ZERO = {
    "sampling": [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
    ],
    "stop": ["max_tokens", "min_tokens", "ignore_eos", "include_stop"],
    "output": ["logprobs", "prompt_logprobs", "skip_special_tokens"],
}


def test_sends_nothing_that_was_left_out() -> None:
    options = GenerateOptions(temperature=None, seed=None, stop_strings=None, request_id=None, tenant=None)
    assert generate_request("x", options) == pb.GenerateRequest(text="x")


@pytest.mark.parametrize(("part", "name"), [(p, n) for p, names in SCALARS_THAT_MAY_BE_ZERO.items() for n in names])
def test_sends_a_zero_as_a_zero(part: str, name: str) -> None:
    request = generate_request("x", {name: 0})  # type: ignore[misc]  # the name is a parameter
    assert getattr(request, part).HasField(name)


def test_places_every_option() -> None:
    options = GenerateOptions(
        temperature=0.5,
        logit_bias={7: -100.0},
        allowed_token_ids=[1, 2],
        banned_token_ids=(3,),
        max_tokens=5,
        stop_strings=["\n", "END"],
        stop_token_ids=[9],
        include_stop=True,
        logprobs=3,
        request_id="mine",
        priority=-1,
        tenant="acme",
    )
    assert generate_request([4, 5], options) == pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[4, 5]),
        request_id="mine",
        priority=-1,
        tenant="acme",
        sampling=pb.SamplingParams(
            temperature=0.5, logit_bias={7: -100.0}, allowed_token_ids=[1, 2], banned_token_ids=[3]
        ),
        stop=pb.StopConditions(max_tokens=5, stop_strings=["\n", "END"], stop_token_ids=[9], include_stop=True),
        output=pb.OutputOptions(logprobs=3),
    )


def test_has_an_option_for_every_field_of_the_protocol() -> None:
    fields = {
        name
        for message in (pb.GenerateRequest, pb.SamplingParams, pb.StopConditions, pb.OutputOptions, pb.ChatPrompt)
        for name in message.DESCRIPTOR.fields_by_name
    }
    not_options = {"text", "token_ids", "chat", "messages", "sampling", "stop", "output"} | {"resume"}  # clients do it
    assert set(GenerateOptions.__annotations__) == fields - not_options


@pytest.mark.parametrize("message", [ChatMessage("user", "Hi"), {"role": "user", "content": "Hi"}])
def test_takes_a_conversation(message: Any) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")])
    assert generate_request([message], {}) == pb.GenerateRequest(chat=chat)
    assert tokenize_request([message]) == pb.TokenizeRequest(chat=chat)
    assert generate_request([message], {"add_generation_prompt": False}).chat.HasField("add_generation_prompt")


def test_sends_an_empty_prompt_for_the_scheduler_to_refuse() -> None:
    assert generate_request([], {}).WhichOneof("prompt") == "token_ids"
    assert generate_request("", {}).WhichOneof("prompt") == "text"


@pytest.mark.parametrize(
    ("prompt", "options", "field", "limit"),
    [
        ("x", {"max_tokens": -1}, "stop.max_tokens", "0 to 4294967295"),
        ("x", {"seed": 2**64}, "sampling.seed", "0 to 18446744073709551615"),
        ("x", {"priority": 2**31}, "priority", "-2147483648 to 2147483647"),
        ("x", {"logit_bias": {-1: 1.0}}, "sampling.logit_bias", "0 to 4294967295"),
        ("x", {"stop_strings": ["\ud800"]}, "stop.stop_strings", "valid Unicode"),
        ("\ud800", {}, "text", "valid Unicode"),
        ([-1], {}, "token_ids.ids", "0 to 4294967295"),
        ([{"role": "user", "content": "\ud800"}], {}, "chat.messages.content", "valid Unicode"),
    ],
)
def test_refuses_what_a_message_cannot_hold(prompt: Any, options: Any, field: str, limit: str) -> None:
    with pytest.raises(ServiceError, match=limit) as caught:
        generate_request(prompt, options)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        (b"bytes", {}),
        ("x", {"max_token": 1}),
        ("x", {"text": "y"}),
        ("x", {"sampling": pb.SamplingParams()}),
        ([{"role": "user"}], {}),
        ([{"role": "user", "content": "Hi", "name": "Ada"}], {}),
    ],
)
def test_a_programming_mistake_is_a_type_error(prompt: Any, options: Any) -> None:
    with pytest.raises(TypeError):
        generate_request(prompt, options)


def test_tokenizes_text_and_conversations_only() -> None:
    with pytest.raises(TypeError):
        tokenize_request([1, 2])  # type: ignore[list-item]  # the mistake under test


def test_detokenize_sends_ids_and_the_flag() -> None:
    assert detokenize_request([1, 2], None) == pb.DetokenizeRequest(token_ids=[1, 2])
    assert detokenize_request([1], False).HasField("skip_special_tokens")
