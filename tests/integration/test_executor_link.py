"""The scheduler's end of the step stream, over real gRPC."""

import asyncio

from moody_executor import MoodyExecutor

from everystop import channel, plan_codec
from everystop.executor.v1 import executor_pb2 as pb
from everystop.plan import Hello, StepPlan
from scheduler_svc import executor_link


async def test_a_plan_that_is_sent_has_the_size_that_it_has_on_the_wire() -> None:
    async with (
        asyncio.timeout(20),
        MoodyExecutor() as executor,
        channel.client_channel(executor.address) as grpc_channel,
        executor_link.connect(grpc_channel, Hello(4, 64), lambda: None, timeout_s=5.0) as link,
    ):
        plan = StepPlan(1, link.executor.epoch)
        assert await link.send(plan) == pb.ExecuteStepsRequest(plan=plan_codec.encode_plan(plan)).ByteSize() > 0
