"""`everystop generate`: one prompt in, its continuation out."""
# ruff: noqa: ASYNC109  # a timeout is sent along as the call's deadline

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Unpack

import click

from everystop.client import AsyncClient, Delta, Event, Finished, FinishReason, GenerateOptions
from everystop.commands.shared import address_option, answer_options, errors_in_one_line

_EXIT_INTERRUPTED = 130
"""What shells report for a program that Ctrl-C ended."""


@click.command()
@click.argument("prompt")
@address_option
@answer_options
@click.option("--request-id", help="Names the request in logs and errors. Drawn when left out.")
@click.option("--logprobs", type=int, help="With --json: log-probabilities of each token and of this many likeliest.")
@click.option("--prompt-logprobs", type=int, help="With --json: the same for the tokens of the prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print the whole answer at once, as one JSON object.")
def generate(
    prompt: str, address: str, as_json: bool, timeout: float | None, **options: Unpack[GenerateOptions]
) -> None:
    """Continue PROMPT and stream the text to standard output.

    "-" reads the prompt from standard input, without its last newline. Counts and timings go to standard error.
    """
    if not as_json and (options.get("logprobs") is not None or options.get("prompt_logprobs") is not None):
        raise click.UsageError("--logprobs and --prompt-logprobs need --json")
    if prompt == "-":
        prompt = _read_prompt()
    answering = _print_json if as_json else _stream_text
    try:
        with errors_in_one_line(address):
            asyncio.run(answering(address, prompt, timeout, options))
    except KeyboardInterrupt:
        sys.exit(_EXIT_INTERRUPTED)


def _read_prompt() -> str:
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"standard input is not UTF-8: {error}") from error


@asynccontextmanager
async def _connected(address: str, timeout: float | None) -> AsyncIterator[AsyncClient]:
    """A client whose scheduler answers. One that goes away later is waited for; a wrong address is told at once."""
    async with AsyncClient(address) as client:
        await client.get_model(timeout=timeout)
        yield client


async def _print_json(address: str, prompt: str, timeout: float | None, options: GenerateOptions) -> None:
    async with _connected(address, timeout) as client:
        completion = await client.complete(prompt, timeout=timeout, **options)
    # The only values that JSON lacks are bytes of tokens: they become lists of integers.
    click.echo(json.dumps(dataclasses.asdict(completion), default=list))


async def _stream_text(address: str, prompt: str, timeout: float | None, options: GenerateOptions) -> None:
    event: Event | None = None
    has_text = False
    try:
        async with _connected(address, timeout) as client:
            async for event in client.generate(prompt, timeout=timeout, **options):
                if isinstance(event, Delta):
                    click.echo(event.text, nl=False)
                    has_text = has_text or bool(event.text)
    finally:
        if has_text:
            click.echo()  # whatever ended the answer, what follows starts on a line of its own
    if isinstance(event, Finished):
        click.echo(summary(event), err=True)


def summary(finished: Finished) -> str:
    """How an answer went, in one line."""
    usage, timings = finished.usage, finished.timings
    parts = [f"{usage.num_output_tokens} tokens", _end(finished), f"prompt of {usage.num_prompt_tokens} tokens"]
    if usage.num_output_tokens:
        parts.append(f"first token after {timings.first_token_ms:.0f} ms")
    decode_ms = timings.total_ms - timings.first_token_ms
    if usage.num_output_tokens > 1 and decode_ms > 0:
        parts.append(f"then {(usage.num_output_tokens - 1) / decode_ms * 1000:.1f} tokens/s")
    if timings.num_preemptions:
        parts.append(f"preempted {timings.num_preemptions} times")
    return ", ".join(parts)


def _end(finished: Finished) -> str:
    match finished:
        case Finished(reason=FinishReason.STOP, matched_stop=str(text)):
            return f"stopped at {text!r}"
        case Finished(reason=FinishReason.STOP, matched_stop=int(token_id)):
            return f"stopped at token {token_id}"
        case Finished(reason=FinishReason.LENGTH):
            return "cut off at the largest length"
        case _:
            return "ended"
