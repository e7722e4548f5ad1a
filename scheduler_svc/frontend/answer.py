"""From the token ids of one answer to the text that its client sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.frontend.stop_strings import StopStrings
from scheduler_svc.frontend.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens added to the text."""

    text: str = ""
    """Whole characters, and nothing that may still turn out to be part of a stop string."""
    matched_stop: str | None = None
    """The stop string that ended the answer here."""


class AnswerText:
    """The text of one answer. Its parts put together equal the whole decoded at once, up to the stop.

    The prompt takes no part: what it left unfinished, such as half a character, is not completed here.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, stop_strings: Sequence[str], include_stop: bool
    ) -> None:
        """`include_stop` leaves the match, or a stop token's text (unless it is special and skipped), in the text."""
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens)
        self._include_stop = include_stop
        self._stops = StopStrings(stop_strings, include_stop=include_stop) if stop_strings else None
        self._matched_stop: str | None = None
        self._ended = False

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the answer, in a push or in what `finish` brought to light."""
        return self._matched_stop

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextDelta:
        """Add tokens. `ends_with_stop_token`: the last of them is what ended the answer. After the end: nothing."""
        if self._ended:
            return TextDelta()
        shown_ids = token_ids[:-1] if ends_with_stop_token and not self._include_stop else token_ids
        text = self._up_to_stop(self._detokenizer.push(shown_ids))
        return TextDelta(text, self._matched_stop)

    def finish(self) -> str:
        """End the answer and return what was held back. It may yet complete a stop string. After the end: nothing."""
        if self._ended:
            return ""
        self._ended = True
        text = self._up_to_stop(self._detokenizer.finish())
        return text if self._stops is None else text + self._stops.finish()

    def _up_to_stop(self, text: str) -> str:
        if self._stops is None:
            return text
        text, self._matched_stop = self._stops.push(text)
        self._ended = self._ended or self._matched_stop is not None
        return text
