"""Options and output that all benchmarks share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def shared_options(command: Command) -> Command:
    """`--executor`, `--model`, `--dtype`, `--repeats` and `--json`."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.option("--repeats", type=click.IntRange(1, 99), default=3, show_default=True, help="Runs of each side."),
        click.option("--dtype", default="auto", show_default=True, help="As in `everystop serve`."),
        click.option("--model", default="default", show_default=True, help="As in `everystop serve`."),
        click.option("--executor", "backend", default="auto", show_default=True, help="As in `everystop serve`."),
    ):
        command = option(command)
    return command


def workload_option(command: Command) -> Command:
    """`--workload FILE`."""
    return click.option(
        "--workload",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="JSON file of requests in place of the synthetic ones.",
    )(command)


def report(figures: Mapping[str, float | int | str], *, as_json: bool) -> None:
    """Print what was measured, as one JSON object or line by line."""
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    if as_json:
        click.echo(json.dumps(rounded))
        return
    width = max(map(len, rounded))
    for name, value in rounded.items():
        click.echo(f"{name:<{width}}  {value}")
