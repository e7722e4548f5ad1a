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
    num_tokens: int = 0
    """How many of the pushed tokens belong to the answer: all, unless a stop string was complete before the last."""


class AnswerText:
    """The text of one answer. The deltas put together equal the whole decoded at once, up to the stop.

    The prompt takes no part: what it left unfinished, such as half a character, is not completed here.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, stop_strings: Sequence[str], include_stop: bool
    ) -> None:
        """`include_stop` leaves the match, or a stop token's text (unless it is special and skipped), in the text."""
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens)
        self._include_stop = include_stop
        self._stops = StopStrings(stop_strings, include_stop=include_stop) if stop_strings else None
        self._ended = False

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextDelta:
        """Add tokens. `ends_with_stop_token`: the last of them is what ended the answer. After a stop: nothing."""
        if self._ended:
            return TextDelta()
        shown_ids = token_ids[:-1] if ends_with_stop_token and not self._include_stop else token_ids
        if self._stops is None:
            return TextDelta(self._detokenizer.push(shown_ids), num_tokens=len(token_ids))
        texts = []
        # One by one, so that the answer ends at the same token however many came at once.
        for num_tokens, token_id in enumerate(shown_ids, 1):
            text, matched_stop = self._stops.push(self._detokenizer.push((token_id,)))
            texts.append(text)
            if matched_stop is not None:
                self._ended = True
                return TextDelta("".join(texts), matched_stop, num_tokens)
        return TextDelta("".join(texts), num_tokens=len(token_ids))

    def finish(self) -> TextDelta:
        """End the answer and return what was held back. It may yet complete a stop string. After a stop: nothing."""
        if self._ended:
            return TextDelta()
        self._ended = True
        rest = self._detokenizer.finish()
        if self._stops is None:
            return TextDelta(rest)
        text, matched_stop = self._stops.push(rest)
        return TextDelta(text + self._stops.finish(), matched_stop)
