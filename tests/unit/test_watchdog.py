import asyncio

import pytest

from executor_svc.watchdog import Watchdog

LIMIT_S = 0.05


async def is_hung(watchdog: Watchdog) -> bool:
    """Whether a hung step is found within three times the limit."""
    try:
        await asyncio.wait_for(watchdog.wait_hung(LIMIT_S), 3 * LIMIT_S)
    except TimeoutError:
        return False
    return True


async def test_a_step_over_the_limit_is_found() -> None:
    watchdog = Watchdog()
    watchdog.began(7)
    step = await asyncio.wait_for(watchdog.wait_hung(LIMIT_S), 10)
    assert step.step_id == 7


async def test_one_that_begins_later_is_found_too() -> None:
    watchdog = Watchdog()
    waiting = asyncio.create_task(watchdog.wait_hung(LIMIT_S))
    await asyncio.sleep(0)
    watchdog.began(8)
    assert (await asyncio.wait_for(waiting, 10)).step_id == 8


async def test_nothing_to_do_is_not_hung() -> None:
    assert not await is_hung(Watchdog())


async def test_steps_that_end_are_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    watchdog = Watchdog()

    async def one_short_step_after_another(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if now_s > 100 * LIMIT_S:
            raise asyncio.CancelledError
        watchdog.ended()
        watchdog.began(int(now_s / LIMIT_S))

    with monkeypatch.context() as patch:
        patch.setattr("executor_svc.watchdog.time.monotonic", lambda: now_s)
        patch.setattr("executor_svc.watchdog.asyncio.sleep", one_short_step_after_another)
        with pytest.raises(asyncio.CancelledError):
            await watchdog.wait_hung(LIMIT_S)
