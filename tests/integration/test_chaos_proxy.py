"""The network that chaos cuts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from everystop_lab.chaos.proxy import proxy_to
from everystop_lab.supervised import free_port


class Echo:
    """A server that sends everything back."""

    def __init__(self) -> None:
        self.address = ""
        self.broken = asyncio.Event()
        """Set when a connection was reset rather than closed."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(100):
                writer.write(piece)
        except ConnectionResetError:
            self.broken.set()
        finally:
            writer.close()


@asynccontextmanager
async def echo() -> AsyncIterator[Echo]:
    running = Echo()
    server = await asyncio.start_server(running.serve, "127.0.0.1", 0)
    running.address = "{}:{}".format(*server.sockets[0].getsockname())
    async with server:
        yield running


@asynccontextmanager
async def connection(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    yield reader, writer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def says(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: bytes) -> bytes:
    writer.write(words)
    return await reader.readexactly(len(words))


async def test_a_cut_resets_both_ends_and_new_connections_pass() -> None:
    async with echo() as target, proxy_to(target.address) as proxy:
        async with connection(proxy.address) as (reader, writer):
            assert await says(reader, writer, b"before") == b"before"
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
            await asyncio.wait_for(target.broken.wait(), 10)
        async with connection(proxy.address) as (reader, writer):
            assert await says(reader, writer, b"after") == b"after"


async def test_without_a_target_a_connection_ends_at_once() -> None:
    async with proxy_to(f"127.0.0.1:{free_port()}") as proxy, connection(proxy.address) as (reader, _):
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(1), 10) == b""
