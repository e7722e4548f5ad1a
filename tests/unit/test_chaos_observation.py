from typing import Any

import pytest

from everystop.client import Accepted, Completion, Delta, Event, Finished, FinishReason, Timings, TokenLogprobs, Usage
from everystop_lab.chaos.items import Item
from everystop_lab.chaos.observation import Observation

ACCEPTED = Accepted("request", 2, 0, 7)
TIMINGS = Timings(0.0, 1.0, 2.0, 0)


def logprobs(*token_ids: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token_id, -1.0, b"") for token_id in token_ids)


def finished(num_output_tokens: int = 3, **fields: Any) -> Finished:
    defaults = {"reason": FinishReason.STOP, "matched_stop": "x"}
    return Finished(usage=Usage(2, 0, num_output_tokens), timings=TIMINGS, **(defaults | fields))


ITEM = Item(
    name="0",
    prompt=[8, 9],
    options={},
    answer=Completion(
        request_id="",
        text="abc",
        token_ids=(1, 2, 3),
        finish_reason=FinishReason.STOP,
        matched_stop="x",
        seed=7,
        usage=Usage(2, 0, 3),
        timings=TIMINGS,
        logprobs=logprobs(1, 2, 3),
        prompt_logprobs=logprobs(9),
    ),
    answer_s=0.1,
)
FIRST = Delta((1, 2), "a", logprobs(1, 2), logprobs(9))
LAST = Delta((3,), "bc", logprobs(3))


def difference(*events: Event) -> str | None:
    seen = Observation()
    for event in events:
        seen.take(event)
    return seen.difference(ITEM)


@pytest.mark.parametrize(
    "events",
    [(), (ACCEPTED,), (ACCEPTED, FIRST), (ACCEPTED, FIRST, LAST), (ACCEPTED, FIRST, LAST, finished())],
)
def test_the_answer_and_every_beginning_of_it_are_right(events: tuple[Event, ...]) -> None:
    assert difference(*events) is None


@pytest.mark.parametrize(
    ("words", "events"),
    [
        ("accepted", (ACCEPTED, FIRST, ACCEPTED)),
        ("tokens differ", (ACCEPTED, Delta((1, 3), "a", logprobs(1, 3)))),
        ("tokens differ", (ACCEPTED, FIRST, FIRST)),  # a repeat
        ("tokens differ", (ACCEPTED, LAST)),  # a gap
        ("4 tokens", (ACCEPTED, FIRST, LAST, Delta((4,), "", logprobs(4)))),
        ("2 tokens", (ACCEPTED, FIRST, finished())),
        ("characters differ", (ACCEPTED, Delta((1,), "b", logprobs(1)))),
        ("2 characters", (ACCEPTED, FIRST, Delta((3,), "b", logprobs(3)), finished())),
        ("0 prompt log-probabilities", (ACCEPTED, Delta((1, 2, 3), "abc", logprobs(1, 2, 3)), finished())),
        ("log-probabilities of other", (ACCEPTED, Delta((1,), "a", logprobs(2)))),
        ("log-probabilities of other", (ACCEPTED, Delta((1,), "a"))),
        ("reason", (ACCEPTED, FIRST, LAST, finished(reason=FinishReason.LENGTH))),
        ("matched stop", (ACCEPTED, FIRST, LAST, finished(matched_stop=None))),
        ("number of output tokens", (ACCEPTED, FIRST, LAST, finished(num_output_tokens=4))),
    ],
)
def test_whatever_else_is_told(words: str, events: tuple[Event, ...]) -> None:
    found = difference(*events)
    assert found is not None
    assert words in found


def test_the_longest_pause_is_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 14.0, 15.0])
    monkeypatch.setattr("everystop_lab.chaos.observation.time.monotonic", lambda: next(times))
    seen = Observation()
    for event in (ACCEPTED, FIRST, LAST, finished()):
        seen.take(event)
    assert seen.max_pause_s == 3.0
