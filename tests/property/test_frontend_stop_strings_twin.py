"""Stop strings against a slow twin that scans the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.frontend.stop_strings import StopStrings


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the match that ends first ends, and the longest stop string that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    return max(n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops))


@settings(deadline=None, derandomize=True, max_examples=500)
@given(
    stops=st.lists(st.text("abé", min_size=1, max_size=6), min_size=1, max_size=4),
    pieces=st.lists(st.text("abé", max_size=5), max_size=12),
    include_stop=st.booleans(),
)
def test_equals_the_slow_twin(stops: list[str], pieces: list[str], include_stop: bool) -> None:
    watcher = StopStrings(stops, include_stop=include_stop)
    shown = seen = ""
    for piece in pieces:
        text, match = watcher.push(piece)
        shown += text
        seen += piece
        expected = first_match(seen, stops)
        if expected is not None:
            end, stop = expected
            assert match == stop
            assert shown == seen[: end if include_stop else end - len(stop)]
            return
        assert match is None
        assert shown == seen[: len(seen) - longest_beginning(seen, stops)]
    assert shown + watcher.finish() == seen
