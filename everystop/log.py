"""Log lines: one event with fields each, to stderr, as JSON or for a reader at a terminal.

Whoever logs never waits and never fails: a line that stderr does not take is dropped, and `log_lines_dropped` says how
many there were as soon as it takes one again.
"""

from __future__ import annotations

import atexit
import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import Processor

from everystop.log_writer import LogWriter

_FLUSH_TIMEOUT_S = 1.0
"""How long the end of a process waits for its last lines to be written."""

_writers: list[LogWriter] = []


def configure(format: str, level: str) -> None:  # noqa: A002  # the setting's name
    """Set up logging for the whole process: structlog's loggers and, through them, the standard library's.

    Args:
        format: "json", "console", or "auto": console when stderr is a terminal.
        level: the least severe level to log, such as "info". Libraries (grpc, asyncio) speak from "warning" on.

    """
    writer = LogWriter(sys.stderr, _log_dropped)
    _writers[:] = [writer]
    file = cast("TextIO", writer)  # as far as logging cares
    severity = logging.getLevelNamesMapping()[level.upper()]
    console = format == "console" or (format == "auto" and _is_terminal())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering = _console() if console else _json()
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=structlog.WriteLoggerFactory(file),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(file)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    if severity > logging.DEBUG:
        handler.addFilter(_is_no_hangup)
    logging.basicConfig(handlers=[handler], level=max(severity, logging.WARNING), force=True)
    logging.captureWarnings(True)


@atexit.register
def flush() -> None:
    """Wait until the lines logged so far are written, at most a second. The end of a process does so by itself."""
    for writer in _writers:
        writer.wait_written(_FLUSH_TIMEOUT_S)


def _is_no_hangup(record: logging.LogRecord) -> bool:
    """False for a client that was gone before its answer was out, which gRPC logs as an error with a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name == "grpc._cython.cygrpc" and type(error).__name__ == "ExecuteBatchError")


def _log_dropped(num_lines: int) -> None:
    structlog.get_logger().warning("log_lines_dropped", num_lines=num_lines)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _json() -> list[Processor]:
    # Without the values of variables: prompts are nobody's business but the client's.
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]


def _console() -> list[Processor]:
    plain = structlog.dev.plain_traceback  # without the values of variables, too
    return [structlog.dev.ConsoleRenderer(colors=_is_terminal(), exception_formatter=plain)]
