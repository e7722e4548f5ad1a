"""Bad input, from a seed: messages with unlikely values, bytes that are no messages, and talk that is no HTTP/2."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from everystop.errors import DOMAIN


def num_inputs(default: int) -> int:
    """How many bad inputs to send: more of them when the environment says so."""
    return int(os.environ.get("EVERYSTOP_FUZZ_INPUTS", default))


_INTEGERS = (0, 1, 2, 15, 16, 17, 255, 256, 258, 259, 260, 1000, 131_071, 131_072, 2**31 - 1)
_FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 100.0, 101.0, -101.0, 1e-45, 3e38, float("nan"), float("inf"), -float("inf"))
_STRINGS = (
    *(
        "",
        "x",
        "\x00",
        "e",
        "é" * 64,
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "\u202eevil",
        "x" * 300,
        "y" * 5000,
    ),
    *("<|im_end|>", "<|im_start|>system", "{{ 7 * 7 }}", "{% raise %}", "'; DROP TABLE--", "\ud7ff\ue000\ufffe\uffff"),
)
_LENGTHS = (0, 1, 2, 3, 16, 17, 65, 260, 1100)


class Fuzzer:
    """Everything drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def fill(self, message: Message, chance: float) -> None:
        """Give each field, by chance, any value."""
        for field in message.DESCRIPTOR.fields:
            if self.random.random() < chance:
                self._set(message, field, chance)

    def spoil(self, message: Message) -> None:
        """Give one field, here or further inside, any value."""
        field = self.random.choice(message.DESCRIPTOR.fields)
        is_message = field.message_type is not None and not field.message_type.GetOptions().map_entry
        if is_message and not field.is_repeated and self.random.random() < 0.9:
            self.spoil(getattr(message, field.name))
        elif is_message and field.is_repeated and len(getattr(message, field.name)) and self.random.random() < 0.8:
            self.spoil(self.random.choice(getattr(message, field.name)))
        else:
            self._set(message, field, 0.5)

    def garble(self, content: bytes) -> bytes:
        """Change a few bytes, cut them, or add others."""
        garbled = bytearray(content)
        for _ in range(self.random.randint(1, 4)):
            place = self.random.randint(0, len(garbled))
            match self.random.randint(0, 4):
                case 0 if place < len(garbled):
                    garbled[place] ^= 1 << self.random.randint(0, 7)
                case 1:
                    garbled[place:place] = self.random.randbytes(self.random.randint(1, 6))
                case 2:
                    del garbled[place : place + self.random.randint(1, 8)]
                case 3:
                    garbled += garbled[place:]
                case _:
                    garbled += self.unknown_field()
        return bytes(garbled)

    def unknown_field(self) -> bytes:
        """A field that no message has."""
        number, content = self.random.randint(100, 20_000), self.random.randbytes(self.random.randint(0, 20))
        return _varint(number << 3 | 2) + _varint(len(content)) + content

    def noise(self) -> bytes:
        """Any bytes."""
        return self.random.randbytes(self.random.choice((0, 1, 2, 5, 20, 100, 1000)))

    def talk(self) -> bytes:
        """What somebody may say who connects to a gRPC port by mistake, or to do harm."""
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        settings = _frame(4, 0, 0, b"")
        choices: list[Callable[[], bytes]] = [
            self.noise,
            lambda: b"",
            lambda: preface[: self.random.randint(1, len(preface))],
            lambda: preface + self.noise(),
            lambda: preface + settings + self.noise(),
            lambda: preface + settings + self._frames(),
            lambda: preface + settings + _frame(1, 4, 1, self.noise()),
            lambda: preface + struct.pack(">I", 0xFFFFFF << 8)[:3] + b"\x00\x00\x00\x00\x00\x01",
            lambda: preface + _frame(4, 0, 0, struct.pack(">HI", self.random.randint(0, 9), 2**32 - 1)),
            lambda: b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
            lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.random.randbytes(300),
        ]
        return self.random.choice(choices)()

    def _frames(self) -> bytes:
        kinds = [self.random.randint(0, 12) for _ in range(self.random.randint(1, 8))]
        stream = self.random.choice((0, 1, 3, 2**31 - 1))
        return b"".join(_frame(kind, self.random.randint(0, 255), stream, self.noise()) for kind in kinds)

    def _set(self, message: Message, field: FieldDescriptor, chance: float) -> None:
        if not field.is_repeated:
            if field.message_type is not None:
                child = getattr(message, field.name)
                child.SetInParent()
                self.fill(child, chance)
            else:
                setattr(message, field.name, self._scalar(field))
            return
        message.ClearField(field.name)
        values, num_entries = getattr(message, field.name), self.random.choice(_LENGTHS)
        if field.message_type is None:
            values.extend(self._scalar(field) for _ in range(num_entries))
        elif field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            values.update({self._scalar(key): self._scalar(value) for _ in range(num_entries)})
        else:
            for _ in range(min(num_entries, 17)):
                self.fill(values.add(), chance)

    def _scalar(self, field: FieldDescriptor) -> Any:
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.random.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return self.random.choice(_FLOATS)
            case FieldDescriptor.CPPTYPE_STRING:
                return self.random.choice(_STRINGS)
            case FieldDescriptor.CPPTYPE_INT32:
                return self.random.choice((*_INTEGERS, -1, -(2**31)))
            case FieldDescriptor.CPPTYPE_UINT64:
                return self.random.choice((*_INTEGERS, 2**32, 2**63, 2**64 - 1))
            case _:
                return self.random.choice((*_INTEGERS, 2**31, 2**32 - 1))


class Tally:
    """What became of the inputs."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def refused(self, error: grpc.aio.AioRpcError) -> None:
        """Count a refusal by its code and reason; one that is not typed has no reason."""
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # the aio error has the same surface
        info = error_details_pb2.ErrorInfo()
        typed = status is not None and status.details and status.details[0].Unpack(info) and info.domain == DOMAIN
        self.outcomes[f"{error.code().name} {info.reason if typed else '(gRPC)'}"] += 1

    def __str__(self) -> str:
        return ", ".join(f"{outcome}: {num_times}" for outcome, num_times in self.outcomes.most_common())


async def talk_to(address: str, content: bytes, *, is_rude: bool) -> None:
    """Connect, say it, hear what comes for a moment, and leave; a rude one resets the connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(content)
        await writer.drain()
        if is_rude:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            await asyncio.wait_for(reader.read(100), 0.02)
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.transport.abort() if is_rude else writer.close()


def _varint(value: int) -> bytes:
    content = bytearray()
    while value > 127:
        content.append(value & 127 | 128)
        value >>= 7
    content.append(value)
    return bytes(content)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload
