"""Request sets: seeded synthetic ones, and files.

The file format is a JSON object of lists of requests, each with `prompt_ids` and `max_tokens`; the list `main` is used.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

_FIRST_PLAIN_ID = 300
"""Token ids from here on stand for ordinary text in byte-level vocabularies, behind special tokens and bytes."""


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request; it ends at `max_tokens`, end-of-sequence is ignored."""

    prompt_token_ids: list[int]
    max_tokens: int


def mixed(num_requests: int, vocab_size: int, *, seed: int = 0) -> list[WorkItem]:
    """Mixed lengths: prompts of 16 to 512 tokens, mean near 150; answers of 8 to 256, mean near 85."""
    rng = random.Random(seed)
    return [
        WorkItem(
            prompt_token_ids=_prompt(rng, _clamp(rng.lognormvariate(4.7, 0.8), 16, 512), vocab_size),
            max_tokens=_clamp(rng.lognormvariate(4.2, 0.7), 8, 256),
        )
        for _ in range(num_requests)
    ]


def exponential_outputs(
    num_requests: int, vocab_size: int, *, mean_tokens: float, max_tokens: int, num_prompt_tokens: int, seed: int = 0
) -> list[WorkItem]:
    """Prompts of one length, answers exponentially distributed; a length over `max_tokens` is drawn again."""
    rng = random.Random(seed)
    items = []
    for _ in range(num_requests):
        length = max_tokens + 1
        while not 1 <= length <= max_tokens:
            length = round(rng.expovariate(1 / mean_tokens))
        items.append(WorkItem(_prompt(rng, num_prompt_tokens, vocab_size), length))
    return items


def read(path: Path) -> list[WorkItem]:
    """The list `main` of a workload file. Raises ValueError when it isn't one."""
    try:
        rows = json.loads(path.read_text())["main"]
        return [WorkItem(list(map(int, row["prompt_ids"])), int(row["max_tokens"])) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no workload file: {error!r}") from error


def _prompt(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    first = min(_FIRST_PLAIN_ID, vocab_size // 4)
    return [rng.randrange(first, vocab_size) for _ in range(num_tokens)]


def _clamp(value: float, low: int, high: int) -> int:
    return max(low, min(high, round(value)))
