"""`everystop chaos`: hurts a service in every way and checks that no client can tell."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import click

from everystop.child import ChildExitedError
from everystop.errors import ServiceError
from everystop.log import configure as configure_log
from everystop_lab.bench.common import report as print_figures
from everystop_lab.chaos.deployment import Commands
from everystop_lab.chaos.items import Sizes
from everystop_lab.chaos.own import OwnTarget, run_own
from everystop_lab.chaos.report import Report
from everystop_lab.chaos.run import Settings, run

_MAX_COMPLAINTS = 20


@click.command
@click.option("--minutes", type=click.FloatRange(0.05, 10_000), default=3.0, show_default=True, help="Of chaos.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same requests and same plan of harm.")
@click.option("--streams", "num_streams", type=click.IntRange(1, 4096), default=24, show_default=True)
@click.option("--kills", "num_kills", type=click.IntRange(0), default=20, show_default=True, help="Of each service.")
@click.option("--stops", "num_stops", type=click.IntRange(0), default=6, show_default=True, help="Of the executor.")
@click.option("--items", "num_items", type=click.IntRange(1), default=48, show_default=True, help="Different requests.")
@click.option("--max-prompt-tokens", type=click.IntRange(8), default=600, show_default=True)
@click.option("--max-tokens", type=click.IntRange(2), default=300, show_default=True, help="Of an answer.")
@click.option(
    "--patience-s",
    type=click.FloatRange(1),
    default=60.0,
    show_default=True,
    help="Seconds without a sign of life after which a request is lost.",
)
@click.option("--executor", "backend", default="mock", show_default=True, help="Backend of the own executor.")
@click.option("--model", default="default", show_default=True, help="As in `everystop serve`.")
@click.option("--dtype", default="auto", show_default=True, help="As in `everystop serve`.")
@click.option(
    "--step-timeout-s",
    type=click.FloatRange(0.1),
    help="Of the own scheduler.  [default: 2 with the mock, else 20]",
)
@click.option("--address", metavar="HOST:PORT", help="A deployment to hurt, in place of own services.")
@click.option("--kill-executor", default="", metavar="COMMAND", help="Kills the executor of --address.")
@click.option("--kill-scheduler", default="", metavar="COMMAND", help="Kills the scheduler of --address.")
@click.option("--log", "log_path", type=click.Path(path_type=Path), help="Where the own services log.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def chaos(
    context: click.Context,
    /,
    minutes: float,
    seed: int,
    num_streams: int,
    num_kills: int,
    num_stops: int,
    num_items: int,
    max_prompt_tokens: int,
    max_tokens: int,
    patience_s: float,
    address: str | None,
    kill_executor: str,
    kill_scheduler: str,
    *,
    as_json: bool,
    **own: Any,
) -> None:
    """Kill and stop the services under mixed load, and check every stream and every block.

    Runs services of its own, or hurts a deployment through commands; both of its services must come back by themselves
    at the same address. Exits with 1 when a stream was lost or wrong, or a block is still used in the end.
    """
    settings = Settings(
        seconds=60 * minutes,
        seed=seed,
        num_streams=num_streams,
        num_items=num_items,
        sizes=Sizes(max_prompt_tokens, max_tokens),
        num_kills=num_kills,
        num_stops=num_stops,
        patience_s=patience_s,
    )
    try:
        if address is None:
            configure_log("auto", "error")  # that services end and come back is no news here
            report = asyncio.run(run_own(OwnTarget(**own), settings))
        elif num_kills and not (kill_executor and kill_scheduler):
            raise click.UsageError("--address needs --kill-executor and --kill-scheduler, or --kills 0.")
        else:
            report = asyncio.run(run(Commands(address, kill_executor, kill_scheduler), settings))
    except ServiceError as error:
        raise click.ClickException(f"undisturbed: {error.message} ({error.code.name})") from error
    except ChildExitedError as error:
        raise click.ClickException(str(error)) from error
    _print(report, settings, as_json=as_json)
    context.exit(0 if report.is_good else 1)


def _print(report: Report, settings: Settings, *, as_json: bool) -> None:
    for complaint in report.complaints[:_MAX_COMPLAINTS]:
        click.echo(complaint, err=True)
    if len(report.complaints) > _MAX_COMPLAINTS:
        click.echo(f"… and {len(report.complaints) - _MAX_COMPLAINTS} more", err=True)
    figures = dataclasses.asdict(report) | {"seconds": settings.seconds, "seed": settings.seed}
    del figures["complaints"]
    print_figures(figures, as_json=as_json)
