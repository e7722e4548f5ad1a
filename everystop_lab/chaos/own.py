"""A run on services of our own."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import click

from everystop_lab.chaos.deployment import OwnDeployment
from everystop_lab.chaos.report import Report
from everystop_lab.chaos.run import Settings, run
from everystop_lab.own_services import own_services

_SCHEDULER_FLAGS = ("--max-num-seqs=16", "--max-num-batched-tokens=256", "--max-prefill-chunk=64")
_EXECUTOR_FLAGS = ("--num-blocks=256", "--max-model-len=2048")
"""Too small for all streams at once: requests wait, prompts come in pieces, and some sequences are preempted."""
_MOCK_FLAGS = ("--mock-step-ms=2", "--mock-token-us=20", "--mock-eos-rate=0.003")
_STEP_TIMEOUT_S = {"mock": 2.0}
_STEP_TIMEOUT_OF_MODELS_S = 20.0
_MAX_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True)
class OwnTarget:
    """Which services to run."""

    backend: str
    model: str
    dtype: str
    step_timeout_s: float | None
    """None: what suits the backend."""
    log_path: Path | None
    """Where they log; None: nowhere, unless one ends by itself."""


async def run_own(target: OwnTarget, settings: Settings) -> Report:
    """Start both services, hurt them and report. Raises ChildExitedError when one does not start, else as `run`."""
    with tempfile.TemporaryDirectory(prefix="everystop-chaos-") as folder:
        path = target.log_path or Path(folder, "log")
        with path.open("w+b") as log:
            report = None
            try:
                report = await _run_logged(target, settings, Path(folder), log)
            finally:
                if target.log_path is None and (report is None or report.unexpected_exits):
                    _print_tail(log)
    return report


async def _run_logged(target: OwnTarget, settings: Settings, folder: Path, log: IO[bytes]) -> Report:
    step_timeout_s = target.step_timeout_s or _STEP_TIMEOUT_S.get(target.backend, _STEP_TIMEOUT_OF_MODELS_S)
    executor_flags = [f"--backend={target.backend}", f"--model={target.model}", *_EXECUTOR_FLAGS]
    executor_flags += _MOCK_FLAGS if target.backend == "mock" else [f"--dtype={target.dtype}"]
    scheduler_flags = [f"--step-timeout-s={step_timeout_s}", *_SCHEDULER_FLAGS]
    max_stop_s = 1.5 * step_timeout_s  # most are shorter than the time-out, some are longer
    async with own_services(executor_flags, scheduler_flags, folder=folder, log=log) as services:
        return await run(OwnDeployment(services, max_stop_s), settings)


def _print_tail(log: IO[bytes]) -> None:
    log.seek(0)
    click.echo(log.read()[-_MAX_TAIL_BYTES:].decode(errors="replace"), err=True)
