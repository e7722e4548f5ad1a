"""`ExecutorService` on the wire: messages in and out, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc
import structlog
from google.protobuf.message import DecodeError

from everystop import plan_codec
from everystop.errors import Reason, ServiceError
from everystop.executor.v1 import executor_pb2 as pb
from everystop.executor.v1 import executor_pb2_grpc as pb_grpc
from everystop.plan import PROTOCOL_VERSION, Hello
from everystop.undecodable import undecodable
from executor_svc.backend import Backend
from executor_svc.engine import Engine, Session

_PIECE_BYTES = 2**20

_log = structlog.get_logger(__name__)

if TYPE_CHECKING:  # the context is generic in its stubs only
    _Requests = AsyncIterator[pb.ExecuteStepsRequest]
    _StepsContext = grpc.aio.ServicerContext[pb.ExecuteStepsRequest, pb.ExecuteStepsResponse]
    _TokenizerContext = grpc.aio.ServicerContext[pb.GetTokenizerRequest, pb.GetTokenizerResponse]


class ExecutorServicer(pb_grpc.ExecutorServiceServicer):
    """Gives each connection a session of the engine."""

    def __init__(self, engine: Engine, backend: Backend) -> None:
        self._engine = engine
        self._tokenizer_files = dict(backend.tokenizer_files())

    async def ExecuteSteps(  # type: ignore[override]  # noqa: N802  # gRPC's name; it takes a coroutine that writes, too
        self, requests: _Requests, context: _StepsContext
    ) -> None:
        """See executor.proto."""
        try:
            session = self._engine.open(await _read_hello(requests))
            try:
                await self._serve(session, requests, context)
            finally:
                self._engine.close(session)
        except ServiceError as error:
            await error.abort(context)

    async def _serve(self, session: Session, requests: _Requests, context: _StepsContext) -> None:
        await context.write(pb.ExecuteStepsResponse(executor=plan_codec.encode_executor(session.executor)))
        receiving = asyncio.create_task(_receive(session, requests), name="plans")
        try:
            while (result := await session.next_result()) is not None:
                await context.write(pb.ExecuteStepsResponse(result=plan_codec.encode_result(result)))
        finally:
            receiving.cancel()
            # Not `await receiving`: its cancellation could not be told from that of this call.
            await asyncio.wait({receiving})

    async def GetTokenizer(  # noqa: N802  # gRPC's name
        self, request: pb.GetTokenizerRequest, context: _TokenizerContext
    ) -> AsyncIterator[pb.GetTokenizerResponse]:
        """See executor.proto."""
        for file_name, content in self._tokenizer_files.items():
            for start in range(0, max(len(content), 1), _PIECE_BYTES):
                yield pb.GetTokenizerResponse(file_name=file_name, content=content[start : start + _PIECE_BYTES])


async def _read_hello(requests: _Requests) -> Hello:
    try:
        message = await anext(requests, pb.ExecuteStepsRequest())
    except DecodeError as error:
        raise undecodable(error) from error
    if message.WhichOneof("message") != "hello":
        raise _out_of_turn("hello", "the first message must be a hello")
    hello = plan_codec.decode_hello(message.hello)
    if hello.protocol_version != PROTOCOL_VERSION:
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            Reason.PROTOCOL_VERSION,
            f"protocol_version: {hello.protocol_version}, this executor speaks {PROTOCOL_VERSION}",
            field="protocol_version",
        )
    return hello


async def _receive(session: Session, requests: _Requests) -> None:
    """Feed plans to the session until the scheduler's side ends, which ends the session too."""
    try:
        async for message in requests:
            if message.WhichOneof("message") != "plan":
                raise _out_of_turn("plan", "after the hello, every message must be a plan")
            session.submit(plan_codec.decode_plan(message.plan))
        session.end(None)
    except ServiceError as error:
        session.end(error)
    except DecodeError as error:
        session.end(undecodable(error))
    except Exception as error:  # noqa: BLE001  # nobody else would hear of it, and the call would hang
        _log.exception("plans_not_readable")
        reason = f"reading the plans failed: {type(error).__name__}: {error}"
        session.end(ServiceError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, reason))


def _out_of_turn(field: str, message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_PLAN, message, field=field)
