"""`everystop drain`: let the scheduler finish and end."""

from __future__ import annotations

import asyncio

import click

from everystop.client import AsyncClient
from everystop.commands.shared import address_option, errors_in_one_line

_ANSWER_WITHIN_S = 10.0


@click.command()
@address_option
@click.option(
    "--grace-s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="End what still runs after this time. The scheduler's own setting when left out.",
)
def drain(address: str, grace_s: float | None) -> None:
    """Let requests finish and end the scheduler.

    It refuses new ones from now on. Whatever runs it may start it again; `everystop serve` ends as well.
    """
    with errors_in_one_line(address):
        num_requests = asyncio.run(_drain(address, grace_s))
    click.echo(f"The scheduler at {address} takes no more requests and ends when {_count(num_requests)} finished.")


async def _drain(address: str, grace_s: float | None) -> int:
    async with AsyncClient(address) as client:
        return await client.drain(grace_s, timeout=_ANSWER_WITHIN_S)


def _count(num_requests: int) -> str:
    return "the last request has" if num_requests == 1 else f"all {num_requests:,} requests have"
