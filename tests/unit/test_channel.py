import asyncio
import socket
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from everystop import channel


@pytest.mark.parametrize("name", sorted({name for name, _ in channel.client_options() + channel.server_options()}))
def test_grpc_knows_every_option(name: str) -> None:
    # gRPC ignores an option that it does not know; the names that it does know are in its binary.
    assert name.encode() + b"\0" in Path(cygrpc.__file__).read_bytes()


def test_servers_bear_the_pings_of_clients() -> None:
    sent_every_ms = dict(channel.client_options())["grpc.keepalive_time_ms"]
    allowed_every_ms = dict(channel.server_options())["grpc.http2.min_ping_interval_without_data_ms"]
    assert allowed_every_ms < sent_every_ms


async def test_a_free_port_is_reported() -> None:
    server = channel.server()
    address = channel.bind(server, "127.0.0.1:0")
    await server.start()
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=5):
        pass
    await server.stop(0)


async def test_a_taken_port_is_an_error() -> None:
    first, second = channel.server(), channel.server()
    address = channel.bind(first, "127.0.0.1:0")
    with pytest.raises(OSError, match=address):
        channel.bind(second, address)
    await first.stop(0)
    await second.stop(0)


def test_the_address_file_appears_whole(tmp_path: Path) -> None:
    file = tmp_path / "address"
    file.write_text("old")
    channel.write_address_file(str(file), "127.0.0.1:1234")
    assert file.read_text() == "127.0.0.1:1234"
    assert list(tmp_path.iterdir()) == [file]


async def test_an_address_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "address"
    waiting = asyncio.create_task(channel.wait_for_address(file))
    await asyncio.sleep(0)
    channel.write_address_file(str(file), "127.0.0.1:1234")
    assert await waiting == "127.0.0.1:1234"


def test_no_address_file_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    channel.write_address_file("", "127.0.0.1:1234")
    assert list(tmp_path.iterdir()) == []
