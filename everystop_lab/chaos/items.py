"""What the clients ask for: seeded requests of every kind, each with its undisturbed answer."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from everystop.client import AsyncClient, ChatMessage, Completion, GenerateOptions, Prompt

_TEXT = (
    "the bus opens its doors at every stop and whoever has a ticket boards while others leave 42 rivers, naïve café "
    "größer 🚌 ไทย 漢字 quick brown foxes; jump? over (lazy) dogs — again and again"
)
_BROKEN_CHARACTERS = "🚌🙂é漢ก"
"""Answers made of their tokens are characters cut at every place, and much that is no character at all."""
_KINDS = ("plain", "plain", "stop string", "logprobs", "penalties", "broken characters", "chat", "include stop")
_MAX_STOP_LENGTH = 6


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One request, and its undisturbed answer."""

    name: str
    prompt: Prompt
    options: GenerateOptions
    answer: Completion
    answer_s: float
    """Seconds that the answer took, alone."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large requests may be, in tokens."""

    max_prompt_tokens: int
    max_tokens: int


async def undisturbed(client: AsyncClient, num_items: int, sizes: Sizes, seed: int) -> list[Item]:
    """Make up `num_items` requests and have each answered alone. Raises ServiceError when one is not."""
    rng = random.Random(f"items {seed}")
    vocab_size = (await client.get_model()).vocab_size
    broken_ids = sorted(set((await client.tokenize(_BROKEN_CHARACTERS)).token_ids))
    items = []
    for index in range(num_items):
        kind = _KINDS[index % len(_KINDS)]
        prompt = _prompt(rng, kind, sizes, vocab_size)
        options = _options(rng, kind, sizes, broken_ids)
        item = await _answered(client, f"{index} ({kind})", prompt, options)
        if kind in ("stop string", "include stop"):
            options = {**options, "stop_strings": _stop_strings(rng, item.answer.text)}
            item = await _answered(client, item.name, prompt, options)
        items.append(item)
    return items


async def _answered(client: AsyncClient, name: str, prompt: Prompt, options: GenerateOptions) -> Item:
    started = time.monotonic()
    answer = await client.complete(prompt, **options)
    return Item(name, prompt, options, answer, time.monotonic() - started)


def _prompt(rng: random.Random, kind: str, sizes: Sizes, vocab_size: int) -> Prompt:
    num_tokens = min(sizes.max_prompt_tokens, round(rng.lognormvariate(4.0, 1.2)) + 1)
    # A word has up to eight characters, and at worst each byte of those is a token.
    text = " ".join(rng.choices(_TEXT.split(), k=max(1, num_tokens // 8)))
    if kind == "chat":
        return [ChatMessage("user", text)]
    if rng.random() < 0.5:
        return text
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def _options(rng: random.Random, kind: str, sizes: Sizes, broken_ids: Sequence[int]) -> GenerateOptions:
    options: GenerateOptions = {
        "max_tokens": min(sizes.max_tokens, round(rng.lognormvariate(4.2, 0.9)) + 2),
        "temperature": 0.0,
    }
    if rng.random() < 0.5:
        options |= {"temperature": rng.uniform(0.3, 1.3), "seed": rng.getrandbits(53), "top_p": rng.uniform(0.5, 1.0)}
    match kind:
        case "logprobs":
            options |= {"logprobs": rng.randint(0, 5), "prompt_logprobs": rng.randint(0, 2)}
        case "penalties":
            options |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}
        case "broken characters":
            options |= {"allowed_token_ids": broken_ids, "temperature": 1.0, "seed": rng.getrandbits(53)}
        case "include stop":
            options |= {"include_stop": True, "min_tokens": 2}
    return options


def _stop_strings(rng: random.Random, text: str) -> list[str]:
    """One that occurs in `text` and one that nearly does."""
    start = rng.randrange(max(1, len(text) - _MAX_STOP_LENGTH))
    stop = text[start : start + rng.randint(2, _MAX_STOP_LENGTH)] or "x"
    return [stop, stop + "\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"]
