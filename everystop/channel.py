"""gRPC channels and servers of Everystop: keepalive, message sizes, binding.

NOTE: gRPC ignores an option whose name it doesn't know, without a word; tests/unit/test_channel.py looks each name up.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import grpc

from everystop.undecodable import UndecodableInterceptor

Options = tuple[tuple[str, int], ...]

PING_INTERVAL_MS = 10_000
"""How often a client asks a silent server whether it lives, during a call."""
MAX_REQUEST_BYTES = 4 * 2**20
"""What the scheduler reads from a client in one message."""
MAX_STEP_BYTES = 256 * 2**20
"""What goes through the step stream in one message: a plan that admits many long sequences."""


def client_channel(address: str) -> grpc.aio.Channel:
    """A channel to a service at "host:port"; it connects by itself, and again after a break."""
    return grpc.aio.insecure_channel(address, options=client_options())


def sync_channel(address: str) -> grpc.Channel:
    """As `client_channel`, for code without an event loop."""
    return grpc.insecure_channel(address, options=client_options())


def server(*, max_request_bytes: int = MAX_REQUEST_BYTES, max_calls: int | None = None) -> grpc.aio.Server:
    """A server without services; larger requests, and more calls at once, are refused with RESOURCE_EXHAUSTED."""
    options = (*server_options(), ("grpc.max_receive_message_length", max_request_bytes))
    return grpc.aio.server(interceptors=[UndecodableInterceptor()], options=options, maximum_concurrent_rpcs=max_calls)


def bind(target: grpc.aio.Server, listen: str) -> str:
    """Bind to "host:port", where port 0 takes a free one, and return the bound "host:port".

    Raises:
        OSError: the port is taken, or the host is none of this machine's.

    """
    try:
        port = target.add_insecure_port(listen)
    except RuntimeError as error:  # all that gRPC says
        raise OSError(f"cannot listen on {listen}: the port is in use, or the host is not of this machine") from error
    return f"{listen.rpartition(':')[0]}:{port}"


def reachable(address: str) -> str:
    """Where this machine reaches what listens on the "host:port" `address`."""
    host, _, port = address.rpartition(":")
    loopback = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)  # noqa: S104  # asks, binds nothing
    return f"{loopback}:{port}"


def write_address_file(path: str, address: str) -> None:
    """Write the bound "host:port" in one go: a reader sees all of it or no file. Does nothing when `path` is empty."""
    if not path:
        return
    file, temporary = tempfile.mkstemp(dir=Path(path).parent, prefix=".address-")
    with os.fdopen(file, "w") as stream:
        stream.write(address)
    Path(temporary).replace(path)


async def wait_for_address(file: Path) -> str:
    """The address in the file that `write_address_file` writes, once it does."""
    while not (address := _content(file)):  # noqa: ASYNC110  # a file has no event
        await asyncio.sleep(0.02)
    return address


def _content(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def client_options(ping_interval_ms: int = PING_INTERVAL_MS) -> Options:
    """Options of every channel."""
    return (
        ("grpc.keepalive_time_ms", ping_interval_ms),
        ("grpc.keepalive_timeout_ms", ping_interval_ms),
        ("grpc.http2.max_pings_without_data", 0),  # no limit: a prefill may be silent for minutes
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.max_receive_message_length", MAX_STEP_BYTES),
        ("grpc.enable_http_proxy", 0),  # the services are on this machine or on a network of their own
    )


def server_options(ping_interval_ms: int = PING_INTERVAL_MS) -> Options:
    """Options of every server that clients with the same `ping_interval_ms` may ping."""
    return (
        # A client that pings more often than this is cut off as abusive. Half the interval: timers are not exact.
        ("grpc.http2.min_ping_interval_without_data_ms", ping_interval_ms // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        # Notices clients whose machine is gone, so that their requests leave the batch.
        ("grpc.keepalive_time_ms", 2 * ping_interval_ms),
        ("grpc.keepalive_timeout_ms", ping_interval_ms),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.so_reuseport", 0),  # else a second server takes half of the calls of the first
    )
