"""The status model over the wire, and whatever else a peer or a proxy may send in its place."""

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from everystop.errors import Reason, ServiceError, from_rpc_error

DETAILS_KEY = "grpc-status-details-bin"
GARBAGE = b"\xff\xff\xff"


def rpc_error(details: bytes | None, message: str = "no") -> grpc.aio.AioRpcError:
    trailers = grpc.aio.Metadata(*(() if details is None else ((DETAILS_KEY, details),)))
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, details=message)


def test_an_error_survives_the_way() -> None:
    error = ServiceError(
        grpc.StatusCode.UNAVAILABLE, Reason.QUEUE_FULL, "no", field="f", retry_after_s=1.5, metadata={"a": "b"}
    )
    trailers = rpc_status.to_status(error.to_status()).trailing_metadata
    received = from_rpc_error(rpc_error(trailers[0][1]))
    assert vars(received) == vars(error)


@pytest.mark.parametrize(
    "details",
    [
        None,
        GARBAGE,
        status_pb2.Status(code=5, message="no").SerializeToString(),  # another code than the call's
        status_pb2.Status(code=14, message="another message").SerializeToString(),
    ],
)
def test_details_that_are_none_leave_the_code_and_the_message(details: bytes | None) -> None:
    received = from_rpc_error(rpc_error(details))
    assert (received.code, received.reason) == (grpc.StatusCode.UNAVAILABLE, Reason.TRANSPORT)
    assert (received.message, received.field, received.retry_after_s) == ("no", None, None)


def test_a_detail_that_is_none_hides_no_other() -> None:
    prefix = "type.googleapis.com/google.rpc."
    good = any_pb2.Any()
    good.Pack(error_details_pb2.ErrorInfo(reason="DRAINING", domain="everystop"))
    unknown = any_pb2.Any()
    unknown.Pack(error_details_pb2.ErrorInfo(reason="OF_A_LATER_VERSION"))
    kinds = ("ErrorInfo", "BadRequest", "RetryInfo", "Unheard")
    details = [*(any_pb2.Any(type_url=prefix + kind, value=GARBAGE) for kind in kinds), good, unknown]
    status = status_pb2.Status(code=14, message="no", details=details)
    received = from_rpc_error(rpc_error(status.SerializeToString()))
    assert (received.reason, received.field, received.retry_after_s) == (Reason.DRAINING, None, None)
