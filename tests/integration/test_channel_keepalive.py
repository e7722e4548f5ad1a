import asyncio
from collections.abc import AsyncIterator

import grpc

from everystop import channel

PING_INTERVAL_MS = 1_000  # gRPC sends no more than one ping a second
SILENCE_S = 4.5
METHOD = "/everystop.test/Silent"


async def silent(request: bytes, context: object) -> AsyncIterator[bytes]:
    """Says nothing for many ping intervals, as a long prefill does."""
    await asyncio.sleep(SILENCE_S)
    yield request


async def call(server_options: channel.Options) -> bytes:
    server = grpc.aio.server(options=server_options)
    handler = grpc.unary_stream_rpc_method_handler(silent)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("everystop.test", {"Silent": handler}),))
    address = channel.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=channel.client_options(PING_INTERVAL_MS)) as client:
            return b"".join([piece async for piece in client.unary_stream(METHOD)(b"hello")])
    finally:
        await server.stop(0)


async def test_a_silent_stream_survives_its_pings_as_the_server_permits_them() -> None:
    strict: channel.Options = (("grpc.http2.max_ping_strikes", 1),)
    permitted, refused = await asyncio.gather(
        call(channel.server_options(PING_INTERVAL_MS)), call(strict), return_exceptions=True
    )
    assert permitted == b"hello"
    assert isinstance(refused, grpc.aio.AioRpcError)
    assert "ping" in str(refused.details()).lower()
