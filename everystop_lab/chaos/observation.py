"""What a client saw of one request, and whether that can be part of the undisturbed answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from everystop.client import Accepted, Delta, Event, Finished
from everystop_lab.chaos.items import Item


@dataclass(slots=True, eq=False)
class Observation:
    """The events of one request as they came."""

    num_accepted: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprob_token_ids: list[int] = field(default_factory=list)
    prompt_logprob_token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    num_events: int = 0
    max_pause_s: float = 0.0
    """The longest time between two events."""
    _last_event_time: float | None = None

    def take(self, event: Event) -> None:
        """Note the next event."""
        now = time.monotonic()
        if self._last_event_time is not None:
            self.max_pause_s = max(self.max_pause_s, now - self._last_event_time)
        self._last_event_time = now
        self.num_events += 1
        match event:
            case Accepted():
                self.num_accepted += 1
            case Delta():
                self.token_ids.extend(event.token_ids)
                self.text += event.text
                self.logprob_token_ids.extend(entry.token_id for entry in event.logprobs)
                self.prompt_logprob_token_ids.extend(entry.token_id for entry in event.prompt_logprobs)
            case Finished():
                self.finished = event

    def difference(self, item: Item) -> str | None:
        """How it differs from the undisturbed answer, in words; None when it is that answer, or its beginning."""
        answer = item.answer
        prompt_logprob_token_ids = [entry.token_id for entry in answer.prompt_logprobs]
        if self.num_accepted > 1:
            return f"{self.num_accepted} accepted events"
        for name, ours, theirs in (
            ("tokens", self.token_ids, answer.token_ids),
            ("characters", self.text, answer.text),
            ("prompt log-probabilities", self.prompt_logprob_token_ids, prompt_logprob_token_ids),
        ):
            if (words := _not_a_beginning(name, ours, theirs, is_whole=self.finished is not None)) is not None:
                return words
        if answer.logprobs and self.logprob_token_ids != self.token_ids:
            return "log-probabilities of other tokens than its own"
        if self.finished is not None:
            return self._wrong_ending(self.finished, item)
        return None

    def _wrong_ending(self, finished: Finished, item: Item) -> str | None:
        answer = item.answer
        for name, ours, theirs in (
            ("reason", finished.reason, answer.finish_reason),
            ("matched stop", finished.matched_stop, answer.matched_stop),
            ("number of output tokens", finished.usage.num_output_tokens, answer.usage.num_output_tokens),
            ("number of prompt tokens", finished.usage.num_prompt_tokens, answer.usage.num_prompt_tokens),
        ):
            if ours != theirs:
                return f"{name} {ours!r} in place of {theirs!r}"
        return None


def _not_a_beginning(name: str, ours: Sequence[object], theirs: Sequence[object], *, is_whole: bool) -> str | None:
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return f"{name} differ from number {index} on: {one!r} in place of {other!r}"
    if len(ours) > len(theirs) or (is_whole and len(ours) < len(theirs)):
        return f"{len(ours)} {name} in place of {len(theirs)}"
    return None
