"""How many threads compute, and how they wait for each other.

Imports no torch: its OpenMP reads the environment once, when it is loaded.
"""

from __future__ import annotations

import os
from pathlib import Path


def configure_environment(threads: int) -> None:
    """Set up OpenMP for `threads` threads (0: one on each core). Call before torch is imported.

    Whatever the user has set stays. The threads share their cores with a scheduler and clients, therefore:

    - A thread that waits for the others spins for a moment, then sleeps. Without the spinning every product pays for
      waking its threads; with the long spinning of OpenMP's default they take the core from the process that would end
      the wait.
    - Threads are not bound to cores. One that is bound waits whenever another process has its core, and all wait for
      it, even beside an idle core; and the calling thread, bound too, passes its binding on to every thread it starts.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads(threads)))
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def num_threads(threads: int) -> int:
    """The setting resolved: `threads`, or one for each core that this process may use."""
    if threads:
        return threads
    num_cores = len(os.sched_getaffinity(0))
    quota = _control_group_cores()
    return num_cores if quota is None else max(1, min(num_cores, int(quota)))


def _control_group_cores() -> float | None:
    # A container's limit is time on any core, which the affinity does not show.
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except OSError:
        return None
    return None if limit == "max" else int(limit) / int(period)
