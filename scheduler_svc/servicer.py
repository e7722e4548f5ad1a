"""The public API: checks what comes in, hands it to the loop, writes what comes out."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import structlog

from everystop.errors import Reason, ServiceError, invalid
from everystop.scheduler.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from everystop.scheduler.v1 import inference_pb2 as pb
from everystop.tracing import TRACEPARENT
from scheduler_svc import limits, unread
from scheduler_svc.lifecycle import Lifecycle
from scheduler_svc.loop import Loop
from scheduler_svc.status import snapshot
from scheduler_svc.stream import RequestStream
from scheduler_svc.text_work import TEXT_WORK
from scheduler_svc.validation import check, check_count, check_ids, tokenize_prompt

Context = grpc.aio.ServicerContext[Any, Any]

_ABORT_TIMEOUT_S = 5.0
"""For a status to go out; a client that reads has it at once."""

log = structlog.get_logger()


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """`everystop.scheduler.v1.InferenceService` over a `Loop`; `inference.proto` says what each call does."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    # A coroutine that writes is cancelled together with its call; a generator would linger until it is collected.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Stream one answer."""
        async with _typed_errors(context):
            desk, stream = self._loop.desk, await self._submit(request, context)
            # NOTE: gRPC keeps the callback until the client is gone, so it must not keep the stream.
            context.add_done_callback(lambda _context: desk.returned())  # type: ignore[arg-type]
            try:
                async with unread.limited(context.write, self._loop.config.max_unread_s) as write:
                    await write(pb.GenerateResponse(accepted=_accepted(stream)))
                    async for event in stream.events():
                        await write(event)
            except ServiceError as error:
                stream.drop()  # there is something only when nobody reads it: other errors come after it
                desk.end(stream, error)
                raise
            finally:
                desk.release(stream)

    async def _submit(self, request: pb.GenerateRequest, context: Context) -> RequestStream:
        """Check and queue a request. Raises ServiceError; that it never got in is then on record, whyever."""
        desk = self._loop.desk
        try:
            model = self._loop.serving()
            with desk.checking():
                generation = await check(request, model)
            return desk.submit(generation, traceparent=_traceparent(context))
        except BaseException as error:
            desk.ledger.refused(request.request_id, request.tenant, _refusal(error))
            raise

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Text or chat messages to token ids."""
        async with _typed_errors(context):
            model = self._loop.serving()
            token_ids = await tokenize_prompt(request, model)
            if len(token_ids) > model.max_model_len:
                raise invalid("prompt", f"has {len(token_ids)} tokens, at most {model.max_model_len}")
            return await TEXT_WORK.do(
                len(token_ids),
                lambda: pb.TokenizeResponse(
                    token_ids=token_ids, token_bytes=map(model.tokenizer.token_bytes, token_ids)
                ),
            )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Token ids to text."""
        async with _typed_errors(context):
            model = self._loop.serving()
            check_count("token_ids", len(request.token_ids), model.max_model_len)
            check_ids("token_ids", request.token_ids, model.executor.model.vocab_size)
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            text = await TEXT_WORK.do(
                len(request.token_ids),
                lambda: model.tokenizer.decode(list(request.token_ids), skip_special_tokens=skip),
            )
            return pb.DetokenizeResponse(text=text)

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:  # noqa: N802
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
                limits={**limits.LIMITS, "token_ids": model.max_model_len},
            )


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """`everystop.scheduler.v1.AdminService` over a `Loop`."""

    def __init__(self, loop: Loop, lifecycle: Lifecycle) -> None:
        self._loop = loop
        self._lifecycle = lifecycle
        self._started = time.monotonic()

    async def GetStatus(  # noqa: N802
        self,
        request: admin_pb2.GetStatusRequest,
        context: Context,
    ) -> admin_pb2.GetStatusResponse:
        """A snapshot."""
        async with _typed_errors(context):
            return snapshot(self._loop, uptime_s=time.monotonic() - self._started)

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:  # noqa: N802
        """Begin to end."""
        async with _typed_errors(context):
            if request.grace_s < 0 or not math.isfinite(request.grace_s):
                raise invalid("grace_s", f"is {request.grace_s:g}, expected at least 0")
            grace_s = request.grace_s if request.HasField("grace_s") else None
            return admin_pb2.DrainResponse(num_requests=self._lifecycle.drain(grace_s))


def _refusal(error: BaseException) -> ServiceError:
    """Why a request never got in."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return ServiceError(grpc.StatusCode.CANCELLED, Reason.CANCELLED, "the call was cancelled")
    return _internal_error()


def _internal_error() -> ServiceError:
    return ServiceError(grpc.StatusCode.INTERNAL, Reason.INTERNAL, "internal error, see the log")


def _traceparent(context: Context) -> str:
    """The trace context that the client sent along, empty when it did not."""
    value = dict(context.invocation_metadata() or ()).get(TRACEPARENT, "")
    return value if isinstance(value, str) else ""


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
        await _abort(context, error)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError as error:
        # What gRPC raises when the client has gone: a write that waits hears of it before the cancellation comes.
        raise asyncio.CancelledError from error
    except Exception:
        log.exception("call_failed", peer=context.peer())
        await _abort(context, _internal_error())


async def _abort(context: Context, error: ServiceError) -> None:
    """End the call with `error`.

    The status goes out behind what the client has not read, which may be never. gRPC keeps it, and at most one message,
    until the client reads or goes; it has no way for a server to drop them. What is ours must not wait for that.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_ABORT_TIMEOUT_S):
            await error.abort(context)
