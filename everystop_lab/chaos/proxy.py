"""A network in between that can be cut."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PIECE_BYTES = 2**16
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds


class Proxy:
    """Passes connections on to a target, until they are cut; then it takes new ones."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self.address = ""
        self._target = host.strip("[]"), int(port)
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Reset every connection, both ways, in the midst of whatever is on its way."""
        for writer in self._writers:
            writer.transport.abort()

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        self._add(writer)
        far_writer = None
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            self._add(far_writer)
            ways = [asyncio.create_task(_pump(reader, far_writer)), asyncio.create_task(_pump(far_reader, writer))]
            _, pending = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in pending:
                way.cancel()
        except OSError:
            pass  # nobody listens there at the moment: the connection ends at once
        finally:
            for end in filter(None, (writer, far_writer)):
                self._writers.discard(end)
                end.transport.abort()

    def _add(self, writer: asyncio.StreamWriter) -> None:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        self._writers.add(writer)


@asynccontextmanager
async def proxy_to(target: str) -> AsyncIterator[Proxy]:
    """Yield a proxy to "host:port", which listens on the loopback until the block ends."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.pass_on, "127.0.0.1", 0)
    proxy.address = "{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass
