"""Chat templates get what transformers gives them, and their refusals reach the client."""

from datetime import datetime

import grpc
import pytest

from everystop.errors import ServiceError
from scheduler_svc.frontend.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<b>สวัสดี</b>"}]


def render(source: str, *, add_generation_prompt: bool = True) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(MESSAGES, add_generation_prompt=add_generation_prompt)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[1]['content'] }}{{ eos_token }}", "<s><b>สวัสดี</b></s>"),
        ("{{ messages[1].content | tojson }}", '"<b>สวัสดี</b>"'),
        (
            "{{ messages[1] | tojson(indent=1, sort_keys=true) }}",
            '{\n "content": "<b>สวัสดี</b>",\n "role": "assistant"\n}',
        ),
        ("{% for m in messages %}\n  {% if loop.last %}{% break %}{% endif %}\n{{ m.role }}\n{% endfor %}", "user\n"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}", "1"),
        ("{{ tools is none }} {{ documents is none }} {{ pad_token is defined }}", "True True False"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
    ],
)
def test_templates_see_what_transformers_shows_them(source: str, expected: str) -> None:
    assert render(source) == expected


def test_generation_prompt_is_told() -> None:
    source = "{% if add_generation_prompt %}go{% endif %}"
    assert render(source) == "go"
    assert render(source, add_generation_prompt=False) == ""


def test_the_date_is_local() -> None:
    before = datetime.now().astimezone()
    rendered = render("{{ strftime_now('%Y-%m-%d') }}")
    assert rendered in {f"{day:%Y-%m-%d}" for day in (before, datetime.now().astimezone())}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_whatever_a_template_raises_is_the_clients_error(source: str, words: str) -> None:
    with pytest.raises(ServiceError, match=words) as refusal:
        render(source)
    assert refusal.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.value.field == "chat.messages"


def test_no_messages_are_refused() -> None:
    with pytest.raises(ServiceError, match="at least 1"):
        ChatTemplate("x", {}).render([], add_generation_prompt=True)
