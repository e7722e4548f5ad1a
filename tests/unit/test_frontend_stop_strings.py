"""Stop strings: where they match, and what is shown before."""

import itertools

import pytest

from scheduler_svc.frontend.stop_strings import StopStrings


def run(stops: list[str], pieces: list[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    watcher = StopStrings(stops, include_stop=include_stop)
    shown = ""
    for piece in pieces:
        text, match = watcher.push(piece)
        shown += text
        if match is not None:
            assert watcher.push("more") == ("", None)
            assert watcher.finish() == ""
            return shown, match
    return shown + watcher.finish(), None


def every_split(text: str) -> list[list[str]]:
    return [
        [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        for num_cuts in range(len(text))
        for cuts in itertools.combinations(range(1, len(text)), num_cuts)
    ]


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_split_at_every_point(include_stop: bool) -> None:
    shown = "a<|end|>" if include_stop else "a"
    for pieces in every_split("a<|end|>b"):
        assert run(["<|end|>"], pieces, include_stop=include_stop) == (shown, "<|end|>")


def test_no_part_of_a_stop_string_is_shown_early() -> None:
    watcher = StopStrings(["END."], include_stop=False)
    assert [watcher.push(char)[0] for char in "xENENDE"] == ["x", "", "", "EN", "", "", "END"]
    assert watcher.finish() == "E"


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["abcd", "bc"], "xabcd", ("xa", "bc")),  # ends first
        (["b", "ab"], "xab", ("x", "ab")),  # end together: the longest
        (["ab", "b"], "xab", ("x", "ab")),
        (["aab"], "aaab", ("a", "aab")),  # overlaps its own beginning
        (["abab", "abc"], "ababc", ("", "abab")),
        (["ababc", "babd"], "ababd", ("a", "babd")),  # found while another was growing
        (["\n\n"], "a\nb\n\n\n", ("a\nb", "\n\n")),
        (["👍🏽"], "ok👍🏽", ("ok", "👍🏽")),
        (["no"], "yes", ("yes", None)),
        (["yes, but"], "yes, b", ("yes, b", None)),
    ],
)
def test_which_match_counts(stops: list[str], text: str, expected: tuple[str, str | None]) -> None:
    assert run(stops, [text]) == expected
    assert run(stops, list(text)) == expected


def test_an_empty_stop_string_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        StopStrings([""], include_stop=False)
