"""A call of the step stream that is cancelled while it ends."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import grpc
import pytest

from everystop import plan_codec
from everystop.executor.v1 import executor_pb2 as pb
from everystop.plan import Hello
from everystop.settings import ExecutorConfig
from executor_svc.engine import Engine
from executor_svc.mock import MockBackend
from executor_svc.servicer import ExecutorServicer

HELLO = Hello(max_num_seqs=4, max_num_batched_tokens=64)


async def a_hello_and_then_nothing() -> AsyncIterator[pb.ExecuteStepsRequest]:
    yield pb.ExecuteStepsRequest(hello=plan_codec.encode_hello(HELLO))
    await asyncio.Event().wait()


@pytest.mark.parametrize("num_turns", range(6))
async def test_its_cancellation_is_not_lost(num_turns: int) -> None:
    backend = MockBackend(ExecutorConfig())
    engine = Engine(backend)
    context: Any = mock.AsyncMock(abort=mock.AsyncMock(side_effect=grpc.aio.AbortError))
    servicer = ExecutorServicer(engine, backend)
    call = asyncio.create_task(servicer.ExecuteSteps(a_hello_and_then_nothing(), context))
    while not context.write.called:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    engine.open(HELLO)  # supersedes it
    for _ in range(num_turns):
        await asyncio.sleep(0)
    had_ended = call.done()
    call.cancel()
    await asyncio.wait({call})
    assert had_ended or call.cancelled()
    assert not had_ended or isinstance(call.exception(), grpc.aio.AbortError)
    await engine.stop()
