"""What a process holds, read from /proc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Usage:
    """A process at one moment."""

    rss_mib: float
    num_fds: int
    num_threads: int


def usage_of(pid: int) -> Usage:
    """Raises FileNotFoundError when there is no such process."""
    folder = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return Usage(
        rss_mib=int(fields["VmRSS"].split()[0]) / 1024,
        num_fds=sum(1 for _ in (folder / "fd").iterdir()),
        num_threads=int(fields["Threads"]),
    )
