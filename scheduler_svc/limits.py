"""How much one request may carry: checked at the edge, named in the error, reported by `GetModel`."""

from __future__ import annotations

from collections.abc import Mapping

MAX_REQUEST_ID_LENGTH = 128
MAX_TENANT_LENGTH = 128
MAX_TEXT_LENGTH = 4_000_000
MAX_CHAT_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_TOKEN_LIST = 1024
"""Of allowed and of banned token ids, which a request holds while it waits: thousands of them may."""
MAX_LOGPROBS = 20

LIMITS: Mapping[str, int] = {
    "request_id": MAX_REQUEST_ID_LENGTH,
    "tenant": MAX_TENANT_LENGTH,
    "text": MAX_TEXT_LENGTH,
    "chat.messages": MAX_CHAT_MESSAGES,
    "stop.stop_strings": MAX_STOP_STRINGS,
    "stop.stop_strings.length": MAX_STOP_STRING_LENGTH,
    "stop.stop_token_ids": MAX_STOP_TOKEN_IDS,
    "sampling.logit_bias": MAX_LOGIT_BIAS,
    "sampling.allowed_token_ids": MAX_TOKEN_LIST,
    "sampling.banned_token_ids": MAX_TOKEN_LIST,
    "output.logprobs": MAX_LOGPROBS,
    "output.prompt_logprobs": MAX_LOGPROBS,
}
