"""Stop strings: found wherever they are split, and never shown in part."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Prefix:
    """A prefix of one or more stop strings; the empty one is the root (Aho-Corasick automaton)."""

    length: int
    longer: dict[str, _Prefix] = field(default_factory=dict)
    """The prefix that each further character leads to."""
    fallback: _Prefix | None = None
    """The longest proper suffix that is a prefix too; None at the root alone."""
    match: str | None = None
    """The longest stop string that this prefix ends with."""


def _advance(prefix: _Prefix, char: str) -> _Prefix:
    while (longer := prefix.longer.get(char)) is None:
        if prefix.fallback is None:
            return prefix
        prefix = prefix.fallback
    return longer


def _build(stops: Sequence[str]) -> _Prefix:
    root = _Prefix(0)
    for stop in stops:
        prefix = root
        for length, char in enumerate(stop, 1):
            prefix = prefix.longer.setdefault(char, _Prefix(length))
        prefix.match = stop
    queue = deque([root])
    while queue:  # breadth first: fallbacks are shorter, so they are complete already
        prefix = queue.popleft()
        for char, longer in prefix.longer.items():
            longer.fallback = root if prefix.fallback is None else _advance(prefix.fallback, char)
            longer.match = longer.match or longer.fallback.match
            queue.append(longer)
    return root


class StopStrings:
    """Passes a text through, piece by piece, up to the first stop string.

    The match that ends first counts: there a reader of single characters would stop, so the answer does not depend on
    how the text was cut into pieces. Of several that end at the same character it is the longest, so that no part of
    a stop string stays in the text. Held back is exactly the longest end of the text that a stop string begins with.
    The cost is linear in the text, whatever the stop strings are.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        """`stops` are not empty. `include_stop` leaves the match in the text."""
        assert all(stops), "an empty stop string would end every answer at once"
        self._root = self._prefix = _build(stops)
        self._include_stop = include_stop
        self._held = ""
        """Always the last `self._prefix.length` characters."""
        self._ended = False

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string that ended it. After the end: nothing."""
        if self._ended:
            return "", None
        pending = self._held + text
        prefix = self._prefix
        for end, char in enumerate(text, len(self._held) + 1):
            prefix = _advance(prefix, char)
            if prefix.match is not None:
                self._ended = True
                self._held = ""
                return pending[: end if self._include_stop else end - len(prefix.match)], prefix.match
        self._prefix = prefix
        num_shown = len(pending) - prefix.length
        self._held = pending[num_shown:]
        return pending[:num_shown], None

    def finish(self) -> str:
        """Return what was held back; the text ends here."""
        held, self._held, self._ended = self._held, "", True
        return held
