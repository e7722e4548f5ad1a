"""The scheduler's end of the step stream: one `ExecutorLink` is one connection, one epoch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import structlog

from everystop import plan_codec
from everystop.errors import Reason, ServiceError, from_rpc_error
from everystop.executor.v1 import executor_pb2 as pb
from everystop.executor.v1 import executor_pb2_grpc as pb_grpc
from everystop.plan import PROTOCOL_VERSION, ExecutorInfo, Hello, StepPlan, StepResult
from everystop.settings import MAX_BLOCKS, MAX_TOKENS

log = structlog.get_logger()


_EXECUTE_STEPS = f"/{pb.DESCRIPTOR.services_by_name['ExecutorService'].full_name}/ExecuteSteps"


class LinkLostError(Exception):
    """The connection to the executor ended; `cause` says how, as a typed error."""

    def __init__(self, cause: ServiceError) -> None:
        super().__init__(f"{cause.code.name} {cause.reason}: {cause.message}")
        self.cause = cause


class _Serializer:
    """Encodes what is sent, and knows how large that was: a message asked for its size is encoded once more."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Of the last one."""

    def __call__(self, request: pb.ExecuteStepsRequest) -> bytes:
        content = request.SerializeToString()
        self.num_bytes = len(content)
        return content


class ExecutorLink:
    """One connection: plans go out with `send`, results gather in `results`."""

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[pb.ExecuteStepsRequest, pb.ExecuteStepsResponse],
        executor: ExecutorInfo,
        on_change: Callable[[], None],
        serializer: _Serializer,
    ) -> None:
        self.executor = executor
        self.results: deque[StepResult] = deque()
        self.lost: ServiceError | None = None
        """Why the connection ended, once it has."""
        self._ended = asyncio.Event()
        self._call = call
        self._on_change = on_change
        self._serializer = serializer

    async def send(self, plan: StepPlan) -> int:
        """Send one plan; returns its size in bytes. Raises LinkLostError."""
        message = pb.ExecuteStepsRequest(plan=plan_codec.encode_plan(plan))
        try:
            await self._call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:  # the call has ended; only its reader learns why
            await self._ended.wait()
            assert self.lost is not None
            raise LinkLostError(self.lost) from error
        return self._serializer.num_bytes

    async def receive_forever(self) -> None:
        """Gather results until the connection ends, which sets `lost`. Announces every change."""
        try:
            while isinstance(response := await self._call.read(), pb.ExecuteStepsResponse):
                if response.WhichOneof("message") != "result":
                    raise _garbage("expected a result")
                self.results.append(plan_codec.decode_result(response.result))
                self._on_change()
        except grpc.RpcError as error:
            self.lost = from_rpc_error(error)
        except ServiceError as error:
            self.lost = error
        except Exception as error:  # whatever the executor sent ends this connection, never the scheduler
            log.exception("result_not_readable")
            self.lost = _garbage(f"{type(error).__name__}: {error}")
        finally:
            self.lost = self.lost or _unavailable("the executor closed the stream")
            self._ended.set()
            self._on_change()


@asynccontextmanager
async def connect(
    channel: grpc.aio.Channel, hello: Hello, on_change: Callable[[], None], *, timeout_s: float
) -> AsyncIterator[ExecutorLink]:
    """Shake hands over `channel` and yield the link. Raises LinkLostError when that fails or takes over `timeout_s`."""
    serializer = _Serializer()
    call = channel.stream_stream(
        _EXECUTE_STEPS, request_serializer=serializer, response_deserializer=pb.ExecuteStepsResponse.FromString
    )()
    try:
        try:
            async with asyncio.timeout(timeout_s):
                await call.write(pb.ExecuteStepsRequest(hello=plan_codec.encode_hello(hello)))
                response = await call.read()
        except grpc.RpcError as error:
            raise LinkLostError(from_rpc_error(error)) from error
        except asyncio.InvalidStateError as error:
            raise LinkLostError(_unavailable("the call ended before the handshake")) from error
        except TimeoutError as error:
            raise LinkLostError(_unavailable(f"no handshake within {timeout_s:g} s")) from error
        if not isinstance(response, pb.ExecuteStepsResponse) or response.WhichOneof("message") != "executor":
            raise LinkLostError(_garbage("expected the executor's side of the handshake"))
        if response.executor.protocol_version != PROTOCOL_VERSION:
            theirs = response.executor.protocol_version
            raise LinkLostError(_garbage(f"protocol version {theirs}, this scheduler speaks {PROTOCOL_VERSION}"))
        executor = plan_codec.decode_executor(response.executor)
        _check_executor(executor)
        link = ExecutorLink(call, executor, on_change, serializer)
        receiver = asyncio.create_task(link.receive_forever(), name="executor-results")
        try:
            yield link
        finally:
            receiver.cancel()
            # Not `await receiver`: its cancellation could not be told from that of whoever waits here.
            await asyncio.wait({receiver})
    finally:
        call.cancel()


async def fetch_tokenizer(channel: grpc.aio.Channel, *, timeout_s: float) -> dict[str, bytes]:
    """The executor's tokenizer files by name. Raises LinkLostError."""
    stub: pb_grpc.ExecutorServiceAsyncStub = pb_grpc.ExecutorServiceStub(channel)
    files: dict[str, bytearray] = {}
    try:
        async for piece in stub.GetTokenizer(pb.GetTokenizerRequest(), timeout=timeout_s):
            if not isinstance(piece, pb.GetTokenizerResponse):  # what gRPC makes of bytes that are none
                raise LinkLostError(_garbage("expected a piece of a tokenizer file"))
            files.setdefault(piece.file_name, bytearray()).extend(piece.content)
    except grpc.RpcError as error:
        raise LinkLostError(from_rpc_error(error)) from error
    return {name: bytes(content) for name, content in files.items()}


def _check_executor(executor: ExecutorInfo) -> None:
    """Refuse numbers that nothing could be scheduled with. Raises LinkLostError."""
    for name, value, low, high in (
        ("block_size", executor.block_size, 1, MAX_TOKENS),
        ("num_blocks", executor.num_blocks, 1, MAX_BLOCKS),
        ("max_model_len", executor.max_model_len, 2, MAX_TOKENS),
        ("vocab_size", executor.model.vocab_size, 1, MAX_TOKENS),
    ):
        if not low <= value <= high:
            raise LinkLostError(_garbage(f"{name} is {value}, not {low} to {high}"))
    vocab_size, eos_token_ids = executor.model.vocab_size, executor.model.eos_token_ids
    if max(eos_token_ids, default=0) >= vocab_size:
        raise LinkLostError(
            _garbage(f"eos_token_ids has {max(eos_token_ids)}, the vocabulary ends at {vocab_size - 1}")
        )


def _unavailable(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, Reason.NO_EXECUTOR, message)


def _garbage(message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, f"the executor answered garbage: {message}")
