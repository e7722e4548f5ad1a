import pytest

from executor_svc.random import philox4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        # The known answers that the authors of Philox publish with Random123.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, words):
    assert philox4x32(counter, key) == words


def test_uniform_is_made_of_the_first_two_words():
    assert uniform(0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 1), (1, 0), (1 << 32, 0), (0, 1 << 32), (1 << 63, 0), (2**64 - 1, 0), (0, 2**64 - 1)]
)
def test_every_bit_of_seed_and_position_counts(seed, position):
    assert uniform(seed, position) != uniform(0, 0)
    assert 0 <= uniform(seed, position) < 1


@pytest.mark.parametrize("numbers", [[uniform(7, i) for i in range(4096)], [uniform(i, 7) for i in range(4096)]])
def test_uniform_fills_the_unit_interval_evenly(numbers):
    in_bin = [0] * 64
    for number in numbers:
        in_bin[int(number * 64)] += 1
    # Chi-square with 63 degrees of freedom: its 99.99 % quantile is 115.
    assert sum((count - 64) ** 2 / 64 for count in in_bin) < 115
