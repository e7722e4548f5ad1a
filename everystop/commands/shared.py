"""What the commands share: where the scheduler is, how to answer, and errors in one line.

NOTE: commands use the asynchronous client, because an event loop takes Ctrl-C at a safe point. A KeyboardInterrupt in
the midst of synchronous gRPC can leave a call half made, and closing the channel then waits for ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click
import grpc

from everystop.errors import Reason, ServiceError

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])

address_option = click.option(
    "--address",
    default="127.0.0.1:50051",
    envvar="EVERYSTOP_ADDRESS",
    show_default=True,
    show_envvar=True,
    metavar="HOST:PORT",
    help="Where the scheduler listens.",
)

_ANSWER_OPTIONS = (
    click.option(
        "--max-tokens", type=int, default=256, show_default=True, help="The most tokens to generate, at least 1."
    ),
    click.option("--min-tokens", type=int, help="No end and no stop token before this many tokens."),
    click.option(
        "--temperature",
        type=float,
        default=0.0,
        show_default=True,
        help="0 is greedy: the same command prints the same text. 1 samples from the model's own distribution.",
    ),
    click.option("--top-p", type=float, help="Keep the likeliest tokens up to this sum of probabilities."),
    click.option("--top-k", type=int, help="Keep this many of the likeliest tokens."),
    click.option("--min-p", type=float, help="Keep tokens at least this likely, relative to the likeliest."),
    click.option("--repetition-penalty", type=float, help="Above 1: shun tokens of prompt and answer."),
    click.option("--presence-penalty", type=float, help="Above 0: shun tokens that the answer has."),
    click.option("--frequency-penalty", type=float, help="The same, for every time that the answer has them."),
    click.option("--seed", type=int, help="Unless greedy: same seed, same answer. Drawn when left out."),
    click.option("--stop", "stop_strings", multiple=True, metavar="TEXT", help="End at this text. Repeatable."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this token. Repeatable."),
    click.option("--include-stop", is_flag=True, help="Leave what it stopped at in the text."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end of sequence."),
    click.option("--priority", type=int, help="Smaller is served first, by policies that look at it."),
    click.option("--tenant", help="Whom to account the request to."),
    click.option("--timeout", type=float, metavar="SECONDS", help="Give an answer up after this time."),
)


def answer_options(function: _FunctionT) -> _FunctionT:
    """Add an option for every way to shape an answer, each named as `Client.generate` names it."""
    for option in reversed(_ANSWER_OPTIONS):
        function = option(function)
    return function


@contextlib.contextmanager
def errors_in_one_line(address: str) -> Iterator[None]:
    """What the scheduler refuses ends the command with one line and exit code 1."""
    try:
        yield
    except ServiceError as error:
        raise click.ClickException(in_one_line(error, address)) from error


def in_one_line(error: ServiceError, address: str) -> str:
    """Say what went wrong, and what to do where that is known."""
    if error.code is grpc.StatusCode.UNAVAILABLE and error.reason is Reason.TRANSPORT:
        # The scheduler's own UNAVAILABLE has another reason: nobody wrote this one.
        return f"no scheduler at {address}; start one with `everystop serve`"
    if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the time is up (--timeout)"
    return f"{error.message} ({error.code.name})"
