"""The one random number behind each sampled token: a function of (seed, position), with no state to lose.

Philox4x32-10 is a counter-based generator: the seed is its key, the position its counter. It is by J. K. Salmon,
M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC '11,
doi:10.1145/2063384.2063405. cuRAND and Triton have it too, so that a GPU can draw the very same numbers.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random words of 32 bits for a counter of four and a key of two such words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product_0 = _MULTIPLIERS[0] * c0
        product_1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _MASK
        k1 = (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A multiple of 2**-53 in [0, 1) for a token of the answer.

    `seed` and `position` (0 is the answer's first token) are unsigned 64-bit numbers.
    """
    high, low, _, _ = philox4x32((position & _MASK, position >> 32, 0, 0), (seed & _MASK, seed >> 32))
    return ((high << 32 | low) >> 11) * 2.0**-53
