"""`everystop bench`: ratios that anyone can measure on their own machine."""

from __future__ import annotations

import click

from everystop_lab.bench.batching import batching
from everystop_lab.bench.overload import overload
from everystop_lab.bench.split import split


@click.group
def bench() -> None:
    """Measure ratios on this machine, each within one run."""


bench.add_command(split)
bench.add_command(batching)
bench.add_command(overload)
