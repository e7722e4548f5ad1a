"""What a run comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from everystop.scheduler.v1 import admin_pb2
from everystop_lab.chaos.clients import Attempt, Outcome
from everystop_lab.chaos.harm import HarmDone


@dataclass(frozen=True, slots=True)
class Report:
    """The figures, and what is behind the bad ones."""

    requests: int
    completed: int
    lost: int
    """Should have completed, and did not."""
    wrong_tokens: int
    """Requests whose tokens, text, log-probabilities or ending are not those of the undisturbed answer."""
    leaked_blocks: int
    """Still used when every request had ended."""
    leaked_requests: int
    """Still running or waiting then."""
    cancelled: int
    deadline_exceeded: int
    vanished: int
    output_tokens: int
    executor_kills: int
    executor_stops: int
    scheduler_kills: int
    unexpected_exits: int
    """Services that ended although nobody had killed them."""
    max_pause_ms: int
    """The longest time between two events of a stream that completed, leaving out clients that pause by themselves."""
    complaints: list[str]

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, wrong, leaked or broken."""
        bad = self.lost + self.wrong_tokens + self.leaked_blocks + self.leaked_requests + self.unexpected_exits
        return bad == 0


def make_report(
    attempts: Sequence[Attempt], status: admin_pb2.GetStatusResponse, done: HarmDone, num_unexpected_exits: int
) -> Report:
    """Check every attempt against its undisturbed answer. `status` is the scheduler's when all had ended."""
    outcomes = Counter(attempt.outcome or Outcome.LOST for attempt in attempts)
    complaints = []
    num_wrong = 0
    for number, attempt in enumerate(attempts):
        difference = attempt.seen.difference(attempt.item)
        num_wrong += difference is not None
        if difference is not None or attempt.outcome in (None, Outcome.LOST):
            complaints.append(_complaint(number, attempt, difference))
    pauses_s = [
        attempt.seen.max_pause_s
        for attempt in attempts
        if attempt.outcome is Outcome.COMPLETED and not attempt.is_paced_by_client
    ]
    return Report(
        requests=len(attempts),
        completed=outcomes[Outcome.COMPLETED],
        lost=outcomes[Outcome.LOST],
        wrong_tokens=num_wrong,
        leaked_blocks=status.blocks.num_used_blocks,
        leaked_requests=status.num_running + status.num_waiting,
        cancelled=outcomes[Outcome.CANCELLED],
        deadline_exceeded=outcomes[Outcome.DEADLINE_EXCEEDED],
        vanished=outcomes[Outcome.VANISHED],
        output_tokens=sum(len(attempt.seen.token_ids) for attempt in attempts),
        executor_kills=done.executor_kills,
        executor_stops=done.executor_stops,
        scheduler_kills=done.scheduler_kills,
        unexpected_exits=num_unexpected_exits,
        max_pause_ms=round(max(pauses_s, default=0.0) * 1000),
        complaints=complaints,
    )


def _complaint(number: int, attempt: Attempt, difference: str | None) -> str:
    parts = [f"request {number} of item {attempt.item.name}, {attempt.behaviour} client"]
    if attempt.outcome is None:
        parts.append(f"did not end: {attempt.seen.num_events} events, {len(attempt.seen.token_ids)} tokens")
    if attempt.outcome is Outcome.LOST:
        error = attempt.error
        parts.append("the stream just ended" if error is None else f"{error.code.name} {error.reason}: {error.message}")
    if difference is not None:
        parts.append(difference)
    return "; ".join(parts)
