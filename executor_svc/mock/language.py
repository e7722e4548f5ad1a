"""The mock's language model: letters as frequent as in English, in an order that depends on the prompt.

At each position one token, drawn from the letter frequencies by a hash of (prompt, position), has half of the
probability; the other half is spread over all tokens by those same frequencies. Greedy sequences get that token. Others
draw with a uniform number that depends on (seed, position) alone. So no token depends on chunking, preemption, restarts
or neighbours.

Bias, allowed, banned and end tokens act as in a real sampler. Temperature only tells greedy from drawn; penalties,
top_p, top_k and min_p change nothing.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from everystop.plan import SamplingParams, SequenceLogprobs
from executor_svc.backend import Seat
from executor_svc.mock.tokenizer import TURN_END_ID, VOCAB_SIZE

# Per thousand characters of English prose, about.
_FREQUENCIES = {
    " ": 180, "e": 100, "t": 74, "a": 66, "o": 61, "i": 57, "n": 57, "s": 52, "h": 50, "r": 49, "d": 35, "l": 33,
    "u": 23, "c": 23, "m": 20, "w": 19, "f": 18, "g": 16, "y": 16, "p": 16, "b": 12, ",": 10, "v": 8, ".": 8, "k": 6,
    "x": 2, "j": 1, "q": 1, "z": 1,
}  # fmt: skip
_FLOOR = 1e-12
"""Probability of everything else: none in practice, but a bias can raise it."""
_PEAK = 0.5
_MASK_64 = 2**64 - 1


class Language:
    """The distribution of tokens. `eos_rate` is the probability that a token ends its sequence."""

    def __init__(self, eos_rate: float) -> None:
        weights = [_FLOOR] * VOCAB_SIZE
        for character, frequency in _FREQUENCIES.items():
            weights[ord(character)] += (1 - eos_rate) * frequency / sum(_FREQUENCIES.values())
        weights[TURN_END_ID] += eos_rate
        self._frequencies = [weight / sum(weights) for weight in weights]
        self._cumulative = list(accumulate(self._frequencies))
        self._ranked = sorted(range(VOCAB_SIZE), key=lambda token_id: -self._frequencies[token_id])

    def draw(self, number: float) -> int:
        """The token at `number`, in [0, 1), of the letter frequencies."""
        return _token_at(self._cumulative, number)

    def probabilities(self, peak: int) -> list[float]:
        """The distribution at a position whose most likely token is `peak`."""
        probabilities = [(1 - _PEAK) * frequency for frequency in self._frequencies]
        probabilities[peak] += _PEAK
        return probabilities

    def logprob(self, token_id: int, peak: int) -> float:
        """Log-probability of a token at a position whose most likely token is `peak`."""
        return math.log((1 - _PEAK) * self._frequencies[token_id] + (_PEAK if token_id == peak else 0.0))

    def top(self, num_top: int, peak: int) -> list[int]:
        """The most likely tokens there, best first; ties by lower id."""
        ranked = [token_id for token_id in self._ranked[: num_top + 1] if token_id != peak]
        return [peak, *ranked][:num_top]


class Speaker:
    """Chooses the tokens of one sequence."""

    def __init__(self, language: Language, seat: Seat) -> None:
        self._language = language
        self._sampling = seat.sampling
        self._num_prompt_tokens = seat.num_prompt_tokens
        prompt = array("I", seat.token_ids[: seat.num_prompt_tokens]).tobytes()
        self._prompt_key = int.from_bytes(hashlib.blake2b(prompt, digest_size=8).digest(), "little")
        self._factors = _factors(seat.sampling)

    def choose(self, position: int) -> int | None:
        """The token at `position` of prompt and answer; None when the sampling parameters leave none."""
        peak = self._peak(position)
        index = position - self._num_prompt_tokens
        number = uniform(self._sampling.seed, index) if self._sampling.temperature > 0 else None
        barred = self._sampling.end_token_ids if index < self._sampling.min_tokens else ()
        if self._factors is not None or barred:
            return self._choose_among(self._weights(peak, barred), number)
        if number is None or number < _PEAK:
            return peak
        return self._language.draw((number - _PEAK) / (1 - _PEAK))

    def logprobs(
        self, slot: int, start: int, token_ids: Sequence[int], num_top: int, *, is_prompt: bool
    ) -> SequenceLogprobs:
        """Those of `token_ids`, which stand at the positions from `start` on."""
        peaks = [self._peak(position) for position in range(start, start + len(token_ids))]
        language = self._language
        top = [(token_id, peak) for peak in peaks for token_id in language.top(num_top, peak)]
        return SequenceLogprobs(
            slot=slot,
            is_prompt=is_prompt,
            token_ids=list(token_ids),
            logprobs=[language.logprob(token_id, peak) for token_id, peak in zip(token_ids, peaks, strict=True)],
            num_top=num_top,
            top_token_ids=[token_id for token_id, _ in top],
            top_logprobs=[language.logprob(token_id, peak) for token_id, peak in top],
        )

    def _peak(self, position: int) -> int:
        return self._language.draw(uniform(self._prompt_key, position))

    def _weights(self, peak: int, barred: Sequence[int]) -> list[float]:
        weights = self._language.probabilities(peak)
        if self._factors is not None:
            weights = [weight * factor for weight, factor in zip(weights, self._factors, strict=True)]
        for token_id in barred:
            weights[token_id] = 0.0
        return weights

    @staticmethod
    def _choose_among(weights: Sequence[float], number: float | None) -> int | None:
        if not any(weights):
            return None
        if number is None:
            return weights.index(max(weights))
        return _token_at(list(accumulate(weights)), number)


def uniform(key: int, index: int) -> float:
    """A number in [0, 1) that depends on the two alone: output `index` of SplitMix64 seeded with `key`."""
    mixed = (key + (index + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return ((mixed ^ (mixed >> 31)) >> 11) * 2.0**-53


def _token_at(cumulative: Sequence[float], number: float) -> int:
    # Rounding can take the product up to the last sum, beyond which no token is; the first that reaches it is possible.
    token_id = bisect_right(cumulative, number * cumulative[-1])
    return token_id if token_id < len(cumulative) else cumulative.index(cumulative[-1])


def _factors(sampling: SamplingParams) -> list[float] | None:
    """What the sampling parameters multiply each token's probability with; None when they change nothing."""
    if not (sampling.logit_bias or sampling.allowed_token_ids or sampling.banned_token_ids):
        return None
    allowed = set(sampling.allowed_token_ids or range(VOCAB_SIZE)).difference(sampling.banned_token_ids)
    bias = dict(sampling.logit_bias)
    # e**500 outweighs everything, and the sum of all such weights is still a finite number.
    return [math.exp(min(bias.get(i, 0.0), 500.0)) if i in allowed else 0.0 for i in range(VOCAB_SIZE)]
