"""One status model: every refusal is a `ServiceError`, on the wire a `google.rpc.Status` with an `ErrorInfo`.

`ErrorInfo.reason` is a constant in capitals, `ErrorInfo.domain` is "everystop"; an invalid field adds a `BadRequest`
detail that names it, and a refusal that a later try may not meet adds a `RetryInfo`.
"""

from __future__ import annotations

import enum
from contextlib import suppress
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

DOMAIN = "everystop"

_Detail: TypeAlias = error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo

_MAX_MESSAGE_BYTES = 1024
"""A status travels in HTTP/2 headers, three times over and encoded; from 8 KiB on peers begin to drop them."""


class Reason(enum.StrEnum):
    """Why a call was refused or ended; the value of `ErrorInfo.reason`."""

    INVALID_FIELD = "INVALID_FIELD"
    UNDECODABLE = "UNDECODABLE"
    """Bytes that are no message of this method."""
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
    """Prompt and answer can never fit into the model's length or the block pool."""
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    QUEUE_FULL = "QUEUE_FULL"
    NO_EXECUTOR = "NO_EXECUTOR"
    DRAINING = "DRAINING"
    CANCELLED = "CANCELLED"
    MODEL_CHANGED = "MODEL_CHANGED"
    """An executor came back with another model, block size or length."""
    STEP_TIMEOUT = "STEP_TIMEOUT"
    """An executor did not answer a step in time."""
    TIME_LIMIT = "TIME_LIMIT"
    """A request waited or ran longer than the scheduler allows."""
    SLOW_READER = "SLOW_READER"
    """A client has not taken anything of its stream for longer than the scheduler allows."""
    EXECUTION_FAILED = "EXECUTION_FAILED"
    """The executor could not compute this one request."""
    INTERNAL = "INTERNAL"
    """A bug on the other side."""
    TRANSPORT = "TRANSPORT"
    """gRPC itself ended the call: nobody listens, the deadline has passed, a message is too large."""
    PROTOCOL_VERSION = "PROTOCOL_VERSION"
    STALE_EPOCH = "STALE_EPOCH"
    STEP_GAP = "STEP_GAP"
    INVALID_PLAN = "INVALID_PLAN"
    SUPERSEDED = "SUPERSEDED"
    """A newer scheduler has connected to this executor."""
    EXECUTOR_LIMIT = "EXECUTOR_LIMIT"
    """A knob of the scheduler is larger than what the executor was started with."""


class ServiceError(Exception):
    """A typed refusal. `code` is gRPC's status code; `field` names the offending field of the request, if one does."""

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: Reason,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata = metadata or {}

    def to_status(self) -> status_pb2.Status:
        """As `google.rpc.Status`, with its details. A long message is cut."""
        message = self.message.encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore")
        details: list[any_pb2.Any] = []

        def add(detail: _Detail) -> None:
            packed = any_pb2.Any()
            packed.Pack(detail)
            details.append(packed)

        add(error_details_pb2.ErrorInfo(reason=self.reason.value, domain=DOMAIN, metadata=self.metadata))
        if self.field is not None:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=message)
            add(error_details_pb2.BadRequest(field_violations=[violation]))
        if self.retry_after_s is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(int(self.retry_after_s * 1000))
            add(error_details_pb2.RetryInfo(retry_delay=delay))
        return status_pb2.Status(code=self.code.value[0], message=message, details=details)

    async def abort(self, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        """End the call of `context` with this status."""
        status = rpc_status.to_status(self.to_status())
        await context.abort(status.code, status.details, tuple(status.trailing_metadata or ()))
        raise AssertionError("abort returns never")


def invalid(field: str, message: str) -> ServiceError:
    """INVALID_ARGUMENT for one field; `message` must name the limit."""
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD, f"{field}: {message}", field=field)


def from_rpc_error(error: grpc.RpcError) -> ServiceError:
    """What a client raises: the typed form of a failed call. Also takes errors without details."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    reason, field, retry_after_s, metadata = Reason.TRANSPORT, None, None, {}
    for detail in _details(error):
        if isinstance(detail, error_details_pb2.ErrorInfo):
            if detail.reason in Reason.__members__:
                reason, metadata = Reason(detail.reason), dict(detail.metadata)
        elif isinstance(detail, error_details_pb2.BadRequest):
            field = detail.field_violations[0].field if detail.field_violations else None
        else:
            retry_after_s = max(0, detail.retry_delay.ToMilliseconds()) / 1000
    return ServiceError(
        error.code(), reason, error.details() or "", field=field, retry_after_s=retry_after_s, metadata=metadata
    )


def _details(error: grpc.Call | grpc.aio.AioRpcError) -> list[_Detail]:
    """The details of known kinds. The peer, or a proxy, may have sent anything: what can't be read is none."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # the aio error has the same surface
    except (ValueError, DecodeError):  # it contradicts the call's own status, or is no status at all
        return []
    details: list[_Detail] = []
    for packed in status.details if status is not None else ():
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            detail = kind()
            with suppress(DecodeError):
                if packed.Unpack(detail):
                    details.append(detail)
    return details
