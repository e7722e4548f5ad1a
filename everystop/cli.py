"""The `everystop` command.

Packages register their subcommands as entry points, so that it imports only what it runs.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from everystop import __version__

ENTRY_POINT_GROUP = "everystop.commands"


class EntryPointGroup(click.Group):
    """A group whose commands are the entry points of `entry_point_group`, each imported when it is asked for."""

    def __init__(self, *, entry_point_group: str, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._entry_points: dict[str, EntryPoint] = {
            entry_point.name: entry_point for entry_point in entry_points(group=entry_point_group)
        }

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names, without importing anything."""
        return sorted(self._entry_points)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when there is none of this name."""
        entry_point = self._entry_points.get(cmd_name)
        if entry_point is None:
            return None
        try:
            command = entry_point.load()
        except ModuleNotFoundError as error:
            return _unavailable(cmd_name, error)
        assert isinstance(command, click.Command)
        return command


def _unavailable(name: str, error: ModuleNotFoundError) -> click.Command:
    # Stands in for a command whose extra is not installed, so that the others still work and are listed.
    def explain(**_arguments: Any) -> None:
        raise error

    return click.Command(
        name,
        callback=explain,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        add_help_option=False,
        context_settings={"ignore_unknown_options": True},
        short_help=f"Not installed: needs {error.name}.",
    )


@click.group(cls=EntryPointGroup, entry_point_group=ENTRY_POINT_GROUP)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """LLM inference with continuous batching: a scheduler and an executor that talk gRPC."""


def main() -> None:
    """Run the command line."""
    try:
        cli(prog_name="everystop")
    except ModuleNotFoundError as error:
        click.echo(f"Error: {error.name!r} is not installed; try: pip install 'everystop[all]'", err=True)
        sys.exit(1)
