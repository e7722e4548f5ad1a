"""`python -m everystop.health ADDRESS SERVICE` succeeds when the service says that it serves; containers ask so."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from everystop.channel import sync_channel

_TIMEOUT_S = 3.0


def is_serving(address: str, service: str) -> bool:
    """Whether "host:port" can be reached and reports `service` as SERVING."""
    with sync_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]  # the stubs lack it
            response = check(request, timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def main() -> None:
    """Exit with 0 when it serves, else with 1."""
    address, service = sys.argv[1:]
    sys.exit(0 if is_serving(address, service) else 1)


if __name__ == "__main__":
    main()
