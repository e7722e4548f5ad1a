"""A client goes on with an answer whose stream broke: what it has is played to the frontend once more, in silence.

The text that a client got is a function of the tokens that it got, because a delta holds all that its tokens bring. So
the tokens alone take the detokenizer and the search for stop strings back to where they were.
"""

from __future__ import annotations

import asyncio

from everystop.errors import invalid
from scheduler_svc.core.request import FinishReason, Request
from scheduler_svc.frontend.answer import AnswerText

_TOKENS_PER_TURN = 256
"""Played at once; between two turns everything else on the event loop gets its own."""


async def replay(request: Request, answer: AnswerText) -> bool:
    """Bring `answer` to where the client left it; whether it has ended there.

    Raises ServiceError INVALID_ARGUMENT for tokens behind the end.
    """
    token_ids = request.answer_token_ids
    for num_tokens, token_id in enumerate(token_ids, start=1):
        reason = request.finish_reason(token_id, num_tokens)
        answer.push([token_id], ends_with_stop_token=reason in (FinishReason.EOS, FinishReason.STOP_TOKEN))
        if reason is not None:
            answer.finish()
        if reason is not None or answer.matched_stop is not None:
            if num_tokens < len(token_ids):
                message = f"has {len(token_ids)} tokens, but the answer ended with token number {num_tokens}"
                raise invalid("resume.token_ids", message)
            return True
        if num_tokens % _TOKENS_PER_TURN == 0:
            await asyncio.sleep(0)
    return False
