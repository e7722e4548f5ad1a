import asyncio
import random
from collections import Counter

import click
import pytest

from everystop.client import Accepted
from everystop_lab.chaos import harm
from everystop_lab.chaos.flow import Flow
from everystop_lab.chaos.harm import Harm, HarmDone, HarmPlan, Tormentor
from everystop_lab.chaos.observation import Observation

ACCEPTED = Accepted("request", 1, 0, 0)


class FakeDeployment:
    """Notes what is done to it; its executor is killed at every second stop."""

    address = "nowhere:1"
    can_stop_executor = True
    num_unexpected_exits = 0

    def __init__(self, *, comes_back: bool = True) -> None:
        self.done: list[str] = []
        self._comes_back = comes_back

    async def kill_executor(self) -> None:
        self.done.append("kill executor")

    async def stop_executor(self, rng: random.Random) -> bool:
        self.done.append("stop executor")
        return self.done.count("stop executor") % 2 == 0

    async def kill_scheduler(self) -> None:
        self.done.append("kill scheduler")
        if not self._comes_back:
            await asyncio.Event().wait()


def test_a_plan_has_all_of_it_in_order_and_leaves_a_quiet_end() -> None:
    made = harm.plan(random.Random(1), 100.0, num_kills=20, num_stops=5)
    assert Counter(kind for _, kind in made.executor) == {Harm.KILL_EXECUTOR: 20, Harm.STOP_EXECUTOR: 5}
    assert Counter(kind for _, kind in made.scheduler) == {Harm.KILL_SCHEDULER: 20}
    for moments in (made.executor, made.scheduler):
        seconds = [moment[0] for moment in moments]
        assert seconds == sorted(seconds)
        assert seconds[0] >= 0
        assert seconds[-1] <= 85


def test_the_same_seed_makes_the_same_plan() -> None:
    one, same, other = (harm.plan(random.Random(seed), 9.0, num_kills=3, num_stops=2) for seed in (4, 4, 5))
    assert one == same
    assert one != other


async def test_a_plan_is_carried_out_and_counted() -> None:
    deployment = FakeDeployment()
    tormentor = Tormentor(deployment, random.Random(0), Flow(), patience_s=10.0)
    stops = [(0.0, Harm.STOP_EXECUTOR)] * 4
    await tormentor.run(HarmPlan([(0.0, Harm.KILL_EXECUTOR), *stops], [(0.0, Harm.KILL_SCHEDULER)] * 3))
    expected = {"kill executor": 1, "stop executor": 4, "kill scheduler": 3}
    assert Counter(deployment.done) == expected
    assert tormentor.done == HarmDone(executor_kills=3, executor_stops=4, scheduler_kills=3)


async def test_of_two_in_a_row_one_waits_until_every_answer_flows() -> None:
    deployment, flow = FakeDeployment(), Flow()
    tormentor = Tormentor(deployment, random.Random(0), flow, patience_s=10.0)
    seen = Observation()
    with flow.running(seen):
        running = asyncio.create_task(tormentor.run(HarmPlan([(0.0, Harm.KILL_EXECUTOR)] * 20, [])))
        num_moves = 0
        async with asyncio.timeout(10):
            while not running.done():
                num_done = len(deployment.done)
                for _ in range(5):  # turns of the loop, in which whatever need not wait is done
                    await asyncio.sleep(0)
                assert len(deployment.done) <= num_done + 2
                seen.take(ACCEPTED)
                flow.move()
                num_moves += 1
    assert len(deployment.done) == 20
    assert num_moves >= 10


async def test_the_flow_is_waited_for_only_so_long() -> None:
    flow = Flow()
    with flow.running(Observation()):
        await flow.all_moved(timeout_s=0.01)


async def test_a_request_that_ends_is_not_waited_for() -> None:
    flow = Flow()
    with flow.running(Observation()):
        waiting = asyncio.create_task(flow.all_moved(timeout_s=60.0))
        await asyncio.sleep(0)
    await asyncio.wait_for(waiting, 10)


async def test_a_service_that_stays_away_ends_the_run() -> None:
    tormentor = Tormentor(FakeDeployment(comes_back=False), random.Random(0), Flow(), patience_s=0.01)
    with pytest.raises(click.ClickException, match=r"killing the scheduler: not possible within 0\.01 s"):
        await tormentor.run(HarmPlan([], [(0.0, Harm.KILL_SCHEDULER)]))
