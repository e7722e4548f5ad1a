"""The client for asyncio."""
# ruff: noqa: ASYNC109  # a timeout is sent along as the call's deadline, so that the scheduler knows it too

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self, Unpack

import grpc

from everystop.channel import client_channel
from everystop.client import requests
from everystop.client.events import Completion, Event, completion_from_events
from everystop.client.requests import ChatMessage, GenerateOptions, Prompt
from everystop.client.resume import AnswerSoFar
from everystop.client.retry import DEFAULT_RETRY, Patience, Retry, closed_error
from everystop.errors import from_rpc_error
from everystop.scheduler.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from everystop.tracing import ClientSpan


class AsyncClient:
    """A connection to a scheduler. Make it inside of the event loop that uses it; any number of calls may run at once.

    `timeout` is everywhere in seconds for the whole call; None waits forever. Every failed call raises
    `everystop.errors.ServiceError`, a stream after all that `retry` allows; None allows nothing.
    """

    def __init__(self, address: str, *, retry: Retry | None = DEFAULT_RETRY) -> None:
        self.address = address
        self._retry = retry
        self._closed = asyncio.Event()
        self._channel = client_channel(address)
        self._inference: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(
            self._channel
        )
        self._admin: admin_pb2_grpc.AdminServiceAsyncStub = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls that still run are cancelled, and raise ServiceError CANCELLED."""
        self._closed.set()
        await self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Event, None]:
        """Stream an answer: one Accepted, any number of Deltas, one Finished, whatever the scheduler goes through.

        The call starts with the iteration. Leaving the iteration (break, an exception, cancelling the task) cancels the
        request; `contextlib.aclosing` does so at an exact place.
        """
        request = requests.generate_request(prompt, options)
        return self._stream(request, timeout)

    async def complete(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Wait for a whole answer."""
        request = requests.generate_request(prompt, options)
        return completion_from_events([event async for event in self._stream(request, timeout)])

    async def tokenize(
        self, prompt: str | Sequence[ChatMessage | Mapping[str, str]], *, timeout: float | None = None
    ) -> inference_pb2.TokenizeResponse:
        """Token ids, and the bytes each stands for, exactly as `generate` would encode the prompt."""
        request = requests.tokenize_request(prompt)
        with self._typed_errors():
            return await self._inference.Tokenize(request, timeout=timeout)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool | None = None, timeout: float | None = None
    ) -> str:
        """Text of token ids; special tokens are left out unless `skip_special_tokens` is false."""
        request = requests.detokenize_request(token_ids, skip_special_tokens)
        with self._typed_errors():
            return (await self._inference.Detokenize(request, timeout=timeout)).text

    async def get_model(self, *, timeout: float | None = None) -> inference_pb2.GetModelResponse:
        """Describe the model being served, and its limits."""
        with self._typed_errors():
            return await self._inference.GetModel(inference_pb2.GetModelRequest(), timeout=timeout)

    async def get_status(self, *, timeout: float | None = None) -> admin_pb2.GetStatusResponse:
        """Snapshot of the scheduler, true at the end of its last step."""
        with self._typed_errors():
            return await self._admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout)

    async def drain(self, grace_s: float | None = None, *, timeout: float | None = None) -> int:
        """Have the scheduler refuse new requests, finish those that are in, at most for `grace_s` seconds, and end.

        Returns at once, with how many are in. When `grace_s` is left out, the scheduler's own setting holds.
        """
        with self._typed_errors():
            return (await self._admin.Drain(admin_pb2.DrainRequest(grace_s=grace_s), timeout=timeout)).num_requests

    async def _stream(
        self, request: inference_pb2.GenerateRequest, timeout: float | None
    ) -> AsyncGenerator[Event, None]:
        answer, patience = AnswerSoFar(request), Patience(self._retry, timeout)
        call = None
        with ClientSpan() as span:
            try:
                while True:
                    try:
                        if call is None:
                            self._check_open()
                            call = self._inference.Generate(
                                answer.next_request(), timeout=patience.remaining_s(), metadata=span.metadata
                            )
                        with self._closing_is_an_error():
                            response = await call.read()
                    except grpc.RpcError as error:
                        call = None
                        if answer.has_finished:
                            return
                        await self._pause(patience.pause_s(from_rpc_error(error)))
                        continue
                    if not isinstance(response, inference_pb2.GenerateResponse):  # the end
                        return
                    event = answer.take(response)
                    if event is not None:
                        patience.renew()
                        yield event
            finally:
                if call is not None:
                    call.cancel()  # does nothing after the end

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        self._check_open()
        try:
            with self._closing_is_an_error():
                yield
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise closed_error()

    @contextmanager
    def _closing_is_an_error(self) -> Iterator[None]:
        """Closing cancels the calls, which gRPC raises as if the task that waits for one were cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed.is_set() and not (task is not None and task.cancelling()):
                raise closed_error() from None
            raise

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)
            raise closed_error()
