"""Failures on demand: "die@40,slow@20:500" makes step 20 take 500 ms and step 40 end the process."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from everystop.errors import invalid


class FailureKind(enum.StrEnum):
    """What goes wrong."""

    DIE = "die"
    """The process ends at once, as if killed."""
    HANG = "hang"
    """The step never ends."""
    SLOW = "slow"
    """The step takes the given milliseconds longer."""
    GARBAGE = "garbage"
    """The step answers token ids that the vocabulary does not have."""
    ERROR = "error"
    """The step raises."""
    SEQUENCE = "sequence"
    """The step can't compute its first sequence."""


_ENTRY = re.compile(rf"(?P<kind>{'|'.join(FailureKind)})@(?P<step>[0-9]+)(:(?P<duration_ms>[0-9]+))?")


@dataclass(frozen=True, slots=True)
class Failure:
    """What goes wrong in one step."""

    kind: FailureKind
    duration_ms: int = 0


def parse_failures(spec: str) -> dict[int, Failure]:
    """Read "kind@step[:ms],…" into failures by step, counted from 1 over the life of the process.

    Raises ServiceError INVALID_ARGUMENT for what it can't read.
    """
    failures: dict[int, Failure] = {}
    for entry in filter(None, (part.strip() for part in spec.split(","))):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            kinds = ", ".join(FailureKind)
            raise invalid("mock_fail", f"{entry!r} is not kind@step, or slow@step:ms, with a kind out of {kinds}")
        kind, step = FailureKind(match["kind"]), int(match["step"])
        if (kind is FailureKind.SLOW) != (match["duration_ms"] is not None):
            raise invalid("mock_fail", f"{entry!r}: slow, and only slow, takes milliseconds, as in slow@20:500")
        if step < 1 or step in failures:
            raise invalid("mock_fail", f"{entry!r}: steps count from 1, and each can fail in one way only")
        failures[step] = Failure(kind, int(match["duration_ms"] or 0))
    return failures
