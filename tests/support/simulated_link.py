"""A network and an executor in memory: the seats and the mock behind calls that move, break and repeat on demand."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_status import rpc_status

from everystop import plan_codec
from everystop.errors import Reason, ServiceError
from everystop.executor.v1 import executor_pb2 as pb
from everystop.plan import PROTOCOL_VERSION, ExecutorInfo, Hello
from everystop.settings import ExecutorConfig
from executor_svc.engine import run_step
from executor_svc.mock import MockBackend
from executor_svc.plan_checks import Limits
from executor_svc.seats import Seats

EOS_RATE = 0.05
BLOCK_SIZE = 4
MANY_BLOCKS = 24


def rpc_error(error: ServiceError) -> grpc.aio.AioRpcError:
    status = rpc_status.to_status(error.to_status())
    trailers = grpc.aio.Metadata(*(status.trailing_metadata or ()))
    return grpc.aio.AioRpcError(error.code, grpc.aio.Metadata(), trailers, details=error.message)


def unavailable(message: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=message)


@functools.cache
def mock_backend(eos_rate: float, block_size: int, num_blocks: int) -> MockBackend:
    config = ExecutorConfig(
        mock_step_ms=0.0, mock_eos_rate=eos_rate, block_size=block_size, num_blocks=num_blocks, max_model_len=60
    )
    return MockBackend(config)


@dataclass(frozen=True)
class Executor:
    """What listens at the address."""

    num_blocks: int = MANY_BLOCKS
    block_size: int = BLOCK_SIZE
    eos_rate: float = EOS_RATE
    is_silent: bool = False
    max_num_seqs: int = 256
    protocol_version: int = PROTOCOL_VERSION

    @property
    def is_the_same(self) -> bool:
        """Whether a scheduler that knows the default one may go on with it."""
        return self == Executor(num_blocks=self.num_blocks)

    @property
    def is_refused_by_all(self) -> bool:
        """Whether no scheduler goes on with it."""
        return self.is_silent or self.max_num_seqs < 256 or self.protocol_version != PROTOCOL_VERSION

    @property
    def backend(self) -> MockBackend:
        return mock_backend(self.eos_rate, self.block_size, self.num_blocks)


class Call:
    """One `ExecuteSteps`: the methods of gRPC for the scheduler, the rest for the rules."""

    def __init__(self, executor: Executor | None, epoch: int, deserialize: Callable[[bytes], Any]) -> None:
        self.executor = executor
        self.plans: deque[bytes] = deque()
        self.results: deque[bytes] = deque()
        self.num_unread = 0
        self.is_cancelled = False
        self.was_tampered_with = False
        self.tell: Callable[[pb.ExecuteStepsResponse], bytes] = pb.ExecuteStepsResponse.SerializeToString
        """Makes bytes of the handshake."""
        self._epoch = epoch
        self._deserialize = deserialize
        self._seats: Seats | None = None
        self._arrived: asyncio.Queue[bytes | grpc.RpcError | None] = asyncio.Queue()
        self._write_error: Exception | None = None
        if executor is None:
            self.break_off(unavailable("connection refused"))

    async def write(self, message: pb.ExecuteStepsRequest) -> None:
        await asyncio.sleep(0)
        if self._write_error is not None:
            raise self._write_error
        if message.WhichOneof("message") == "plan":
            self.plans.append(message.plan.SerializeToString())
        else:
            self._shake_hands(plan_codec.decode_hello(message.hello))

    async def read(self) -> Any:
        arrived = await self._arrived.get()
        if isinstance(arrived, grpc.RpcError) or arrived is None:
            self._arrived.put_nowait(arrived)
            if arrived is None:
                return grpc.aio.EOF
            raise arrived
        self.num_unread -= 1
        try:
            return self._deserialize(arrived)
        except Exception:  # noqa: BLE001  # as gRPC does
            return None

    def cancel(self) -> bool:
        self.is_cancelled = True
        return True

    def _shake_hands(self, hello: Hello) -> None:
        executor = self.executor
        assert executor is not None
        if executor.is_silent:
            return
        if hello.max_num_seqs > executor.max_num_seqs:
            refusal = ServiceError(grpc.StatusCode.FAILED_PRECONDITION, Reason.EXECUTOR_LIMIT, "max_num_seqs")
            self.break_off(rpc_error(refusal))
            return
        backend = executor.backend
        backend.reset()
        self._seats = Seats(Limits.of(backend.info, hello), self._epoch)
        names = ("model", "block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
        told = {name: getattr(backend.info, name) for name in names}
        info = ExecutorInfo(epoch=self._epoch, backend="mock", device="none", dtype="none", **told)
        message = plan_codec.encode_executor(info)
        message.protocol_version = executor.protocol_version
        self.arrive(self.tell(pb.ExecuteStepsResponse(executor=message)))

    def execute(self) -> None:
        """The executor runs the oldest plan. It asserts that it may: no plan may ever be refused."""
        assert self.executor is not None
        assert self._seats is not None
        plan = plan_codec.decode_plan(pb.StepPlan.FromString(self.plans.popleft()))
        result = plan_codec.encode_result(run_step(self._seats, self.executor.backend, plan))
        self._seats.check_integrity()
        self.results.append(pb.ExecuteStepsResponse(result=result).SerializeToString())

    def arrive(self, message: bytes) -> None:
        self.num_unread += 1
        self._arrived.put_nowait(message)

    def break_off(self, error: grpc.RpcError | None) -> None:
        """End the call; None is an end without an error. Results that have arrived can still be read."""
        self._arrived.put_nowait(error)
        self.break_writes(asyncio.InvalidStateError("the RPC has finished"))

    def break_writes(self, error: Exception) -> None:
        """The way to the executor is gone; what it sent may still arrive."""
        self._write_error = error
        self.was_tampered_with = True
        self.plans.clear()


class Network:
    """What `channel.client_channel` gives the loop."""

    def __init__(self) -> None:
        self.listening = asyncio.Event()
        self.executor: Executor | None = None
        self.calls: list[Call] = []
        self.tell = pb.ExecuteStepsResponse.SerializeToString

    async def __aenter__(self) -> Network:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def channel_ready(self) -> None:
        await self.listening.wait()

    def stream_stream(self, _method: str, response_deserializer: Callable[[bytes], Any], **_: Any) -> Any:
        def call() -> Call:
            self.calls.append(Call(self.executor, 1000 + len(self.calls), response_deserializer))
            self.calls[-1].tell = self.tell
            return self.calls[-1]

        return call

    def unary_stream(self, _method: str, **_: Any) -> Any:
        async def get_tokenizer(_request: Any, timeout: float) -> AsyncIterator[pb.GetTokenizerResponse]:
            if self.executor is None:
                raise unavailable("connection refused")
            for name, content in self.executor.backend.tokenizer_files().items():
                yield pb.GetTokenizerResponse(file_name=name, content=content)

        return get_tokenizer
