"""Conversations become prompts through the model's own chat template, rendered as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from everystop.errors import invalid


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it only renders them."""

    tags = {"generation"}  # noqa: RUF012  # the name and type that jinja asks for

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().astimezone().strftime(format_)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, which the models have never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def choose_template(entry: object) -> str | None:
    """Return the template of a `chat_template` entry in tokenizer_config.json: one source, or a list of named ones.

    Of named ones, "default" is the one. None when there is no such entry, or no default among several.
    """
    if isinstance(entry, str):
        return entry
    if isinstance(entry, Sequence):
        named = {template["name"]: str(template["template"]) for template in entry}
        return named.get("default")
    return None


class ChatTemplate:
    """One model's template, compiled at its first use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the variables that it may use by name, such as `bos_token`."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """Return the prompt. Raises INVALID_ARGUMENT with the template's own words when it refuses the messages."""
        if not messages:
            raise invalid("chat.messages", "must have at least 1 message")
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.source)
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is the model's code: whatever it raises concerns this request alone
            raise invalid("chat.messages", f"the model's chat template refuses them: {error}") from error
