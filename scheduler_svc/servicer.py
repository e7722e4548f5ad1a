"""The public API: checks what comes in, hands it to the loop, writes what comes out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog

from everystop.errors import Reason, ServiceError
from everystop.scheduler.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from everystop.scheduler.v1 import inference_pb2 as pb
from scheduler_svc import limits
from scheduler_svc.loop import Loop
from scheduler_svc.status import snapshot
from scheduler_svc.stream import RequestStream
from scheduler_svc.validation import check, check_ids, tokenize_prompt

Context = grpc.aio.ServicerContext[Any, Any]

log = structlog.get_logger()


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """`everystop.scheduler.v1.InferenceService` over a `Loop`; `inference.proto` says what each call does."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    # A coroutine that writes is cancelled together with its call; a generator would linger until it is collected.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Stream one answer."""
        async with _typed_errors(context):
            generation = await check(request, self._loop.serving())
            stream = self._loop.submit(generation)
            try:
                await context.write(pb.GenerateResponse(accepted=_accepted(stream)))
                async for event in stream.events():
                    await context.write(event)
            finally:
                self._loop.release(stream)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Text or chat messages to token ids."""
        async with _typed_errors(context):
            model = self._loop.serving()
            token_ids = await tokenize_prompt(request, model)
            return pb.TokenizeResponse(token_ids=token_ids, token_bytes=map(model.tokenizer.token_bytes, token_ids))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Token ids to text."""
        async with _typed_errors(context):
            model = self._loop.serving()
            check_ids("token_ids", request.token_ids, model.executor.model.vocab_size)
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            return pb.DetokenizeResponse(text=model.tokenizer.decode(list(request.token_ids), skip_special_tokens=skip))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # noqa: ARG002, N802
        """What is served."""
        async with _typed_errors(context):
            model = self._loop.serving()
            return pb.GetModelResponse(
                name=model.executor.model.name,
                vocab_size=model.executor.model.vocab_size,
                max_model_len=model.max_model_len,
                eos_token_ids=model.executor.model.eos_token_ids,
                chat_template=model.tokenizer.chat_template or "",
                dtype=model.executor.dtype,
                limits=limits.LIMITS,
            )


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """`everystop.scheduler.v1.AdminService` over a `Loop`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._started = time.monotonic()

    async def GetStatus(  # noqa: N802
        self,
        request: admin_pb2.GetStatusRequest,  # noqa: ARG002
        context: Context,
    ) -> admin_pb2.GetStatusResponse:
        """A snapshot."""
        async with _typed_errors(context):
            return snapshot(self._loop, uptime_s=time.monotonic() - self._started)


def _accepted(stream: RequestStream) -> pb.Accepted:
    return pb.Accepted(
        request_id=stream.request.request_id,
        num_prompt_tokens=len(stream.request.prompt_token_ids),
        seed=stream.request.sampling.seed,
    )


@asynccontextmanager
async def _typed_errors(context: Context) -> AsyncIterator[None]:
    """End the call with the error's own status; a bug is logged and becomes INTERNAL, for this call alone."""
    try:
        yield
    except ServiceError as error:
        await error.abort(context)
    except grpc.aio.AbortError:
        raise
    except Exception:
        log.exception("call_failed", peer=context.peer())
        await ServiceError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, "internal error, see the log").abort(context)
