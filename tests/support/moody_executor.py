"""An executor on a real port that does right or wrong, by connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import grpc

from everystop import channel, plan_codec
from everystop.executor.v1 import executor_pb2 as pb
from everystop.plan import ExecutorInfo
from everystop.settings import ExecutorConfig
from executor_svc.engine import Engine
from executor_svc.mock import MockBackend
from executor_svc.servicer import ExecutorServicer

_SERVICE = pb.DESCRIPTOR.services_by_name["ExecutorService"].full_name

Requests = AsyncIterator[pb.ExecuteStepsRequest]
Context = Any
Behaviour = Callable[[Requests, Context], Awaitable[None]]


class MoodyExecutor:
    """Serves the mock. Each connection takes the next of `moods`; when there is none, everything is right.

    There are two engines that the connections take turns at, as if two executors stood behind one address.
    """

    def __init__(self, **settings: Any) -> None:
        self.moods: deque[Behaviour] = deque()
        self.tokenizer_files: dict[str, bytes] | None = None
        """Sent in place of the mock's, when given."""
        self.num_connections = 0
        self.address = ""
        self._config = ExecutorConfig(**{"listen": "127.0.0.1:0", "mock_step_ms": 1.0, **settings})
        self._break = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._engines = [Engine(MockBackend(self._config)) for _ in range(2)]
        self._servicers = [ExecutorServicer(engine, MockBackend(self._config)) for engine in self._engines]
        self._server = channel.server(max_request_bytes=channel.MAX_STEP_BYTES)
        handlers = {
            "ExecuteSteps": grpc.stream_stream_rpc_method_handler(
                self._execute_steps, pb.ExecuteStepsRequest.FromString, _to_bytes
            ),
            "GetTokenizer": grpc.unary_stream_rpc_method_handler(
                self._get_tokenizer, pb.GetTokenizerRequest.FromString, _to_bytes
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        self.address = channel.bind(self._server, self._config.listen)
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._server.stop(0)
        for engine in self._engines:
            await engine.stop()

    def break_off(self, *moods: Behaviour) -> None:
        """End the connection at hand; the next ones are in `moods`."""
        self.moods.extend(moods)
        self._break.set()
        self._break = asyncio.Event()

    async def _execute_steps(self, requests: Requests, context: Context) -> None:
        self.num_connections += 1
        right = self._servicers[self.num_connections % 2].ExecuteSteps
        behave = self.moods.popleft() if self.moods else right
        broken = asyncio.create_task(self._break.wait())
        guarded = _GuardedContext(context)
        behaving = asyncio.ensure_future(behave(requests, guarded))
        try:
            await asyncio.wait({broken, behaving}, return_when=asyncio.FIRST_COMPLETED)
            if behaving.done():
                behaving.result()
                return
        finally:
            broken.cancel()
            async with guarded.writing:
                behaving.cancel()
                await asyncio.gather(behaving, return_exceptions=True)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the test breaks the connection off")

    async def _get_tokenizer(self, request: pb.GetTokenizerRequest, context: Context) -> AsyncIterator[Any]:
        if self.tokenizer_files is None:
            async for piece in self._servicers[0].GetTokenizer(request, context):
                yield piece
        else:
            for name, content in self.tokenizer_files.items():
                yield pb.GetTokenizerResponse(file_name=name, content=content)


class _GuardedContext:
    """A context whose writes are not cancelled halfway: gRPC can't send a status then."""

    def __init__(self, context: Context) -> None:
        self.writing = asyncio.Lock()
        self._context = context

    async def write(self, message: Any) -> None:
        async with self.writing:
            await self._context.write(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _to_bytes(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def executor_info(**changes: Any) -> pb.ExecutorInfo:
    """What the mock says at the handshake, but for `changes`."""
    info = MockBackend(ExecutorConfig()).info
    names = ("model", "block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    told = {name: getattr(info, name) for name in names}
    message = plan_codec.encode_executor(ExecutorInfo(epoch=7, backend="mock", device="none", dtype="none", **told))
    for name, value in changes.items():
        if isinstance(value, dict):
            for inner, inner_value in value.items():
                setattr(getattr(message, name), inner, inner_value)
        else:
            setattr(message, name, value)
    return message


def says(*messages: pb.ExecuteStepsResponse | bytes) -> Behaviour:
    """Write the messages, one for each that comes in, and then nothing more."""

    async def behave(requests: Requests, context: Context) -> None:
        for message in messages:
            await anext(requests)
            await context.write(message)
        await asyncio.Event().wait()

    return behave
