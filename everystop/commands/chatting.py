"""`everystop chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Unpack

import click

from everystop.client import AsyncClient, ChatMessage, Delta, GenerateOptions
from everystop.commands.shared import address_option, answer_options, errors_in_one_line, in_one_line
from everystop.errors import ServiceError

_HELP = "/reset forgets the conversation, /exit leaves"


@click.command()
@click.option("--system", metavar="TEXT", help="What the model is told before the conversation.")
@address_option
@answer_options
def chat(system: str | None, address: str, timeout: float | None, **options: Unpack[GenerateOptions]) -> None:
    """Talk to the model.

    The conversation is kept in memory and sent whole with every line. /reset forgets it, /exit (or Ctrl-D) leaves,
    Ctrl-C stops an answer. Answers are greedy unless --temperature says otherwise.
    """
    # The loop runs while there is something to wait for, not while a line is typed.
    with errors_in_one_line(address), asyncio.Runner() as runner:
        client = runner.run(_connect(address))
        try:
            model = runner.run(client.get_model(timeout=timeout))
            if not model.chat_template:
                raise click.ClickException(f"{model.name} has no chat template; use `everystop generate`")
            click.echo(f"{model.name} listens. {_HELP}, Ctrl-C stops an answer.", err=True)
            _talk(_Conversation(runner, client, system, timeout, options))
        finally:
            runner.run(client.close())


async def _connect(address: str) -> AsyncClient:
    return AsyncClient(address)  # in a coroutine, because it belongs to the loop that it is made in


def _talk(conversation: _Conversation) -> None:
    """Line after line, until the last one. Raises ServiceError when nobody sits there to read it."""
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() line editing and a history

    while True:
        try:
            line = input("> " if is_interactive else "").strip()
            if line == "/exit":
                return
            conversation.take(line)
        except EOFError:
            return
        except KeyboardInterrupt:
            click.echo()  # drops the line, as in a shell
        except ServiceError as error:
            if not is_interactive:
                raise
            click.echo(f"Error: {in_one_line(error, conversation.address)}", err=True)


class _Conversation:
    """What has been said, and how to go on."""

    def __init__(
        self,
        runner: asyncio.Runner,
        client: AsyncClient,
        system: str | None,
        timeout: float | None,
        options: GenerateOptions,
    ) -> None:
        self.address = client.address
        self._runner = runner
        self._client = client
        self._timeout = timeout
        self._options = options
        self._opening = [ChatMessage("system", system)] if system is not None else []
        self._messages = list(self._opening)

    def take(self, line: str) -> None:
        """Do what a line says: a command, or a question to answer. A question that fails is not kept."""
        if line == "/reset":
            self._messages = list(self._opening)
        elif line.startswith("/"):
            click.echo(_HELP, err=True)
        elif line:
            question = [*self._messages, ChatMessage("user", line)]
            answer = self._answer(question)
            self._messages = [*question, ChatMessage("assistant", answer)]

    def _answer(self, messages: list[ChatMessage]) -> str:
        """Print the answer as it comes, and return it, or as much as there was when Ctrl-C stopped it."""
        texts: list[str] = []
        try:
            self._runner.run(self._stream(messages, texts))
        except KeyboardInterrupt:
            click.echo(" [stopped]", nl=False, err=True)
        finally:
            click.echo()
        return "".join(texts)

    async def _stream(self, messages: list[ChatMessage], texts: list[str]) -> None:
        async for event in self._client.generate(messages, timeout=self._timeout, **self._options):
            if isinstance(event, Delta):
                texts.append(event.text)
                click.echo(event.text, nl=False)
