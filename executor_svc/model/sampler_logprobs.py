"""Natural log-probabilities of the model's own distribution: before bias, masks, penalties, temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everystop.plan import SequenceLogprobs
from executor_svc.backend import Seat
from executor_svc.model.sampler_top import top


def sampled_logprobs(logits: Tensor, seats: Sequence[Seat], token_ids: Sequence[int]) -> list[SequenceLogprobs]:
    """Those of one sampled token for each seat, all of which ask for them (`num_logprobs`).

    Args:
        logits: [len(seats), vocab], as the model gave them.
        seats: One for each row.
        token_ids: One for each row.
    """
    nums_top = [min(seat.sampling.num_logprobs or 0, logits.shape[-1]) for seat in seats]
    logprobs, top_ids, top_logprobs = _gather(logits, token_ids, max(nums_top))
    return [
        SequenceLogprobs(
            slot=seat.slot,
            is_prompt=False,
            token_ids=[token_ids[row]],
            logprobs=[logprobs[row]],
            num_top=num_top,
            top_token_ids=top_ids[row][:num_top],
            top_logprobs=top_logprobs[row][:num_top],
        )
        for row, (seat, num_top) in enumerate(zip(seats, nums_top, strict=True))
    ]


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, seat: Seat, first_position: int) -> SequenceLogprobs:
    """Those of prompt tokens, each predicted by the row of the token before it.

    Args:
        logits: [rows, vocab] of the tokens at `first_position` and after, as the model gave them. Each is followed by
            another token of the prompt.
        seat: Of a sequence that asks for them (`num_prompt_logprobs`).
        first_position: Index in `seat.token_ids`; the first token reported is the one after it.
    """
    end_position = first_position + 1 + len(logits)
    assert end_position <= seat.num_prompt_tokens, "the last row predicts a token of the answer"
    token_ids = seat.token_ids[first_position + 1 : end_position]
    num_top = min(seat.sampling.num_prompt_logprobs or 0, logits.shape[-1])
    logprobs, top_ids, top_logprobs = _gather(logits, token_ids, num_top)
    return SequenceLogprobs(
        slot=seat.slot,
        is_prompt=True,
        token_ids=token_ids,
        logprobs=logprobs,
        num_top=num_top,
        top_token_ids=[token_id for row in top_ids for token_id in row],
        top_logprobs=[logprob for row in top_logprobs for logprob in row],
    )


def _gather(
    logits: Tensor, token_ids: Sequence[int], num_top: int
) -> tuple[list[float], list[list[int]], list[list[float]]]:
    """Of each row: the token's log-probability, the ids of the best, and their log-probabilities."""
    scores = logits.float()
    logprobs = scores.log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(token_ids, dtype=torch.int64, device=logits.device).unsqueeze(-1))
    if num_top == 0:
        return chosen.flatten().tolist(), [[] for _ in token_ids], [[] for _ in token_ids]
    # By logit: rounding may make different ones equal as log-probabilities, and the first must be the greedy choice.
    _, top_ids = top(scores, num_top)
    return chosen.flatten().tolist(), top_ids.tolist(), logprobs.gather(-1, top_ids).tolist()
