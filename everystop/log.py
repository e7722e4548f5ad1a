"""Log lines: one event with fields each, to stderr, as JSON or for a reader at a terminal."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor


def configure(format: str, level: str) -> None:  # noqa: A002  # the setting's name
    """Set up logging for the whole process: structlog's loggers and, through them, the standard library's.

    Args:
        format: "json", "console", or "auto": console when stderr is a terminal.
        level: the least severe level to log, such as "info". Libraries (grpc, asyncio) speak from "warning" on.

    """
    severity = logging.getLevelNamesMapping()[level.upper()]
    console = format == "console" or (format == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering = _console() if console else _json()
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    logging.basicConfig(handlers=[handler], level=max(severity, logging.WARNING), force=True)
    logging.captureWarnings(True)


def _json() -> list[Processor]:
    # Without the values of variables: prompts are nobody's business but the client's.
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]


def _console() -> list[Processor]:
    plain = structlog.dev.plain_traceback  # without the values of variables, too
    return [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
