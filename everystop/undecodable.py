"""Bytes that are no message are refused like everything else that is wrong with a request.

gRPC itself would answer UNKNOWN, as for a bug, and log a traceback for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from everystop.errors import Reason, ServiceError

if TYPE_CHECKING:  # generic in its stubs only
    _Handler = grpc.RpcMethodHandler[Any, Any]

_Method = Callable[[Any, Any], Any]


class UndecodableInterceptor(grpc.aio.ServerInterceptor):
    """For methods with one request; those with a stream of them meet a `DecodeError` where they read."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Put the check between the decoder and the method."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        decode, encode = _decoder(handler.request_deserializer), handler.response_serializer
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_checked_stream(handler.unary_stream), decode, encode)
        return grpc.unary_unary_rpc_method_handler(_checked(handler.unary_unary), decode, encode)


def undecodable(error: DecodeError) -> ServiceError:
    """The refusal."""
    message = f"the request can't be decoded: {error}"
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, Reason.UNDECODABLE, message)


def _decoder(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return the error in place of the request: what a decoder raises never reaches the method."""

    def decode_or_error(content: bytes) -> Any:
        try:
            return decode(content)
        except DecodeError as error:
            return error

    return decode_or_error


def _checked(method: _Method | None) -> _Method:
    assert method is not None

    async def checked(request: Any, context: Any) -> Any:
        if isinstance(request, DecodeError):
            await undecodable(request).abort(context)
        return await method(request, context)

    return checked


def _checked_stream(method: _Method | None) -> _Method:
    assert method is not None

    async def checked(request: Any, context: Any) -> None:
        if isinstance(request, DecodeError):
            await undecodable(request).abort(context)
        if inspect.isasyncgenfunction(method):
            async for response in method(request, context):
                await context.write(response)
        else:
            await method(request, context)

    return checked
