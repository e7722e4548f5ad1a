"""What a request does to its logits before temperature: bias, masks, minimum length, penalties.

`sampler.py` says in which order, and whose definitions these are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from executor_svc.backend import Seat

_MAX_LOGIT = torch.finfo(torch.float32).max


class Adjustments:
    """The adjustments of one seated sequence, and the token counts that they need."""

    def __init__(self, seat: Seat, vocab_size: int, device: torch.device) -> None:
        params = seat.sampling
        self._params = params
        self._bias_ids = _ids((token_id for token_id, _ in params.logit_bias), device)
        self._bias = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32, device=device)
        self._end_ids = _ids(params.end_token_ids, device)
        self._forbidden: Tensor | None = None
        if params.allowed_token_ids or params.banned_token_ids:
            self._forbidden = torch.full((vocab_size,), bool(params.allowed_token_ids), device=device)
            self._forbidden[_ids(params.allowed_token_ids, device)] = False
            self._forbidden[_ids(params.banned_token_ids, device)] = True
        self._occurrences: _Occurrences | None = None
        if params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0:
            self._occurrences = _Occurrences(seat, device)

    def apply_at(self, position: int) -> bool:
        """Whether the answer's token at `position` is adjusted at all."""
        return (
            len(self._bias_ids) > 0
            or self._forbidden is not None
            or self._occurrences is not None
            or position < self._params.min_tokens
        )

    def apply(self, logits: Tensor, position: int) -> None:
        """Adjusts `logits` ([vocab], float32) in place; those of tokens that may not be chosen become -inf.

        `position` is that of the token to be chosen, 0 for the answer's first.
        """
        if len(self._bias_ids) > 0:
            logits[self._bias_ids] += self._bias
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden, -math.inf)
        if position < self._params.min_tokens:
            logits[self._end_ids] = -math.inf
        if self._occurrences is not None:
            self._penalize(logits, self._occurrences)

    def count(self, token_id: int) -> None:
        """Takes in a token of the answer."""
        if self._occurrences is not None:
            self._occurrences.add(token_id)

    def _penalize(self, logits: Tensor, occurrences: _Occurrences) -> None:
        params = self._params
        penalized = logits[occurrences.ids]
        factor = params.repetition_penalty
        # Divided by a tiny factor a logit may overflow.
        penalized = torch.where(penalized > 0, penalized / factor, penalized * factor).clamp_(max=_MAX_LOGIT)
        penalized -= params.frequency_penalty * occurrences.counts
        penalized -= params.presence_penalty * (occurrences.counts > 0)
        logits[occurrences.ids] = penalized


class _Occurrences:
    """The distinct tokens of one sequence, and how often each occurs in its answer (0: in the prompt alone).

    As lists, not as rows of the vocabulary's size: a penalty costs what the sequence holds.
    """

    def __init__(self, seat: Seat, device: torch.device) -> None:
        ids, indices = np.unique(np.asarray(seat.token_ids, dtype=np.int64), return_inverse=True)
        counts = np.bincount(indices[seat.num_prompt_tokens :], minlength=len(ids))
        self._ids = torch.from_numpy(ids).to(device)
        self._counts = torch.from_numpy(counts).to(device, torch.float32)
        self._index_of = {token_id: index for index, token_id in enumerate(ids.tolist())}

    @property
    def ids(self) -> Tensor:
        """[distinct tokens], int64."""
        return self._ids[: len(self._index_of)]

    @property
    def counts(self) -> Tensor:
        """[distinct tokens], float32."""
        return self._counts[: len(self._index_of)]

    def add(self, token_id: int) -> None:
        """Counts one more token of the answer."""
        index = self._index_of.setdefault(token_id, len(self._index_of))
        if index == len(self._ids):
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        self._ids[index] = token_id
        self._counts[index] += 1


def _ids(token_ids: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=device)
