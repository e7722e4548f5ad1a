"""The frontend against transformers on the real model's files."""

from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.frontend import Tokenizer
from scheduler_svc.frontend.chat import ChatTemplate

TEXTS = [
    "The capital of France is",
    " leading and trailing \n\n",
    "12345.678 tabs\tand\r\nlines",
    "สวัสดีครับ 👩‍👩‍👧‍👦 é e\u0301 \u200b\ufeff",
    "written <|im_start|>user\nspecials<|im_end|> and <|nothing|>",
    "nul \0 and \uffff",
    "",
]

CONVERSATIONS = [
    [{"role": "user", "content": "What is gravity?"}],
    [{"role": "system", "content": "Be <brief> & 'kind'."}, {"role": "user", "content": " hi \n"}],
    [
        {"role": "user", "content": "สวัสดี"},
        {"role": "assistant", "content": '{"a": [1, 2]}'},
        {"role": "user", "content": "{{ 7 * 7 }} <|im_end|>"},
    ],
]

TEMPLATES = [
    # Llama-like: BOS, strict alternation, trimmed contents.
    """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' + message['role']) }}
    {%- endif %}
    {{- '[' + message.role | upper + '] ' + message.content | trim + eos_token }}
{%- endfor %}
{% if add_generation_prompt %}[ASSISTANT]{% endif %}
""",
    # JSON, namespaces, loop controls, white space around blocks.
    """{% set ns = namespace(turn=0) %}
    {% for message in messages %}
        {% if message['role'] == 'system' %}{% continue %}{% endif %}
        {% set ns.turn = ns.turn + 1 %}
{{ ns.turn }}: {{ message | tojson }}
    {% endfor %}
{{ {'tools': tools, 'unk': unk_token} | tojson(indent=2) }}""",
    # Macros, the generation tag, slices, undefined variables.
    """{% macro turn(message) %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endmacro %}
{% for message in messages[-2:] %}
{% generation %}{{ turn(message) }}{% endgeneration %}
{% endfor %}{{ nothing }}{{ nothing is defined }}""",
]


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    from transformers import AutoTokenizer  # here, because it takes seconds

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    names = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
    return Tokenizer.from_files(
        {name: (model_dir / name).read_bytes() for name in names if (model_dir / name).exists()}
    )


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert token_ids == reference(text)["input_ids"]
    for skip_special_tokens in (False, True):
        expected = reference.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens) == expected
        detokenizer = tokenizer.detokenizer(skip_special_tokens)
        assert "".join(detokenizer.push([token_id]) for token_id in token_ids) + detokenizer.finish() == expected


@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_models_own_template(
    tokenizer: Tokenizer, reference: Any, messages: list[dict[str, str]], add_generation_prompt: bool
) -> None:
    assert tokenizer.chat_template == reference.chat_template
    expected = reference.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)["input_ids"]
    assert tokenizer.encode_chat(messages, add_generation_prompt=add_generation_prompt) == expected


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_other_templates(reference: Any, messages: list[dict[str, str]], source: str) -> None:
    expected = reference.apply_chat_template(messages, chat_template=source, tokenize=False, add_generation_prompt=True)
    template = ChatTemplate(source, reference.special_tokens_map)
    assert template.render(messages, add_generation_prompt=True) == expected
