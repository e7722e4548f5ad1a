import pytest

from everystop.backoff import FIRST_DELAY_S, MAX_DELAY_S, Backoff


def test_it_doubles_up_to_the_limit_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: (low + high) / 2)
    backoff = Backoff()
    delays_s = [backoff.next_delay_s(was_useful=False) for _ in range(8)]
    assert delays_s[:3] == pytest.approx([FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S])
    assert delays_s[-1] == MAX_DELAY_S
    assert backoff.next_delay_s(was_useful=True) == pytest.approx(FIRST_DELAY_S)
    assert backoff.next_delay_s(was_useful=False) == pytest.approx(2 * FIRST_DELAY_S)


def test_two_do_not_try_in_step() -> None:
    assert Backoff().next_delay_s(was_useful=False) != Backoff().next_delay_s(was_useful=False)


def test_no_wait_at_all() -> None:
    backoff = Backoff(max_delay_s=0.0)
    assert [backoff.next_delay_s(was_useful=False) for _ in range(3)] == [0.0] * 3
