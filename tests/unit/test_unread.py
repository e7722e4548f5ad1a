"""The limit on how long an answer waits for its client, in virtual time."""

import asyncio
from collections.abc import Iterator

import pytest
from virtual_time import VirtualLoop

from everystop.errors import Reason, ServiceError
from everystop.scheduler.v1 import inference_pb2 as pb
from scheduler_svc import unread

EVENT = pb.GenerateResponse()


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.close()


async def write_all(waits_s: list[float], *, pause_s: float = 0.0) -> int:
    """Write once for each of `waits_s` to a client that takes it after that time. Returns how many it took."""
    num_written, waits = 0, iter(waits_s)

    async def slow(_event: pb.GenerateResponse) -> None:
        await asyncio.sleep(next(waits))

    try:
        async with unread.limited(slow, max_unread_s=60.0) as write:
            for _ in waits_s:
                await write(EVENT)
                num_written += 1
                await asyncio.sleep(pause_s)
    except ServiceError as error:
        assert error.reason is Reason.SLOW_READER  # noqa: PT017
        assert error.message == "nothing of the answer was read for 60 s in all"  # noqa: PT017
    return num_written


def test_a_client_that_takes_a_message_just_in_time_again_and_again_is_cut_off(loop: VirtualLoop) -> None:
    assert loop.run_until_complete(write_all([59.0] * 10)) == 1
    assert 60 <= loop.time() <= 67.5


def test_a_client_that_takes_nothing_is_cut_off_at_the_limit(loop: VirtualLoop) -> None:
    assert loop.run_until_complete(write_all([1e9])) == 0
    assert 60 <= loop.time() <= 67.5


def test_time_in_which_there_is_nothing_to_read_does_not_count(loop: VirtualLoop) -> None:
    assert loop.run_until_complete(write_all([1.0] * 50, pause_s=100.0)) == 50


def test_many_writes_leave_no_timers_behind(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        async def at_once(_event: pb.GenerateResponse) -> None:
            pass

        async with unread.limited(at_once, max_unread_s=60.0) as write:
            for _ in range(1000):
                await write(EVENT)
            assert len(loop._scheduled) == 1  # cancelled ones stay in there until they are due

    loop.run_until_complete(scenario())


def test_a_timeout_of_the_code_inside_passes(loop: VirtualLoop) -> None:
    async def scenario() -> None:
        async with unread.limited(asyncio.sleep, max_unread_s=60.0):  # type: ignore[arg-type]
            raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        loop.run_until_complete(scenario())
