"""`everystop chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Unpack

import click

from everystop.client import ChatMessage, Client, Delta, GenerateOptions
from everystop.commands.shared import address_option, answer_options, connected, in_one_line
from everystop.errors import ServiceError


@click.command()
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@address_option
@answer_options
def chat(system: str | None, address: str, timeout: float | None, **options: Unpack[GenerateOptions]) -> None:
    """Talk to the model.

    The conversation is kept in memory and sent whole with every line. /reset forgets it, /exit (or Ctrl-D) leaves,
    Ctrl-C stops an answer. Answers are greedy unless --temperature says otherwise.
    """
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() line editing and a history

    with connected(address) as client:
        model = client.get_model()
        if not model.chat_template:
            raise click.ClickException(f"{model.name} has no chat template; use `everystop generate`")
        click.echo(f"{model.name} listens. /reset forgets, /exit leaves, Ctrl-C stops an answer.", err=True)
        opening = [ChatMessage("system", system)] if system is not None else []
        messages = list(opening)
        while (line := _read_line("> " if is_interactive else "")) not in (None, "/exit"):
            if line == "/reset":
                messages = list(opening)
            elif line.startswith("/"):
                click.echo("/reset forgets the conversation, /exit leaves", err=True)
            elif line:
                question = [*messages, ChatMessage("user", line)]
                try:
                    answer = _stream_answer(client, question, timeout, options)
                except ServiceError as error:
                    if not is_interactive:
                        raise
                    # The question is not kept, so that it can be asked again.
                    click.echo(f"Error: {in_one_line(error, address)}", err=True)
                else:
                    messages = [*question, ChatMessage("assistant", answer)]


def _read_line(prompt: str) -> str | None:
    """The next line, empty after Ctrl-C; None at the end of the input."""
    try:
        return input(prompt).strip()
    except KeyboardInterrupt:
        click.echo()
        return ""
    except EOFError:
        return None


def _stream_answer(client: Client, messages: list[ChatMessage], timeout: float | None, options: GenerateOptions) -> str:
    """Print an answer as it comes, and return it, or as much as there was when Ctrl-C stopped it."""
    texts: list[str] = []
    try:
        for event in client.generate(messages, timeout=timeout, **options):
            if isinstance(event, Delta):
                texts.append(event.text)
                click.echo(event.text, nl=False)
    except KeyboardInterrupt:
        click.echo(" [stopped]", nl=False, err=True)
    finally:
        click.echo()
    return "".join(texts)
