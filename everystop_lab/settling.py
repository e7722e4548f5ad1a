"""Waits until a scheduler has nothing left."""

from __future__ import annotations

import asyncio

from everystop.client import AsyncClient
from everystop.errors import ServiceError
from everystop.scheduler.v1 import admin_pb2

_SETTLE_S = 10.0
"""How long a scheduler may take to have nothing left, once every client has gone."""
_POLL_S = 0.05


async def settled(client: AsyncClient, patience_s: float) -> admin_pb2.GetStatusResponse:
    """The scheduler's status once it has an executor and nothing else; when something stays, the last one.

    Raises ServiceError when it can't be reached for `patience_s` seconds.
    """
    loop = asyncio.get_running_loop()
    reachable_until, settled_until = loop.time() + patience_s, loop.time() + _SETTLE_S
    while True:
        try:
            status = await client.get_status()
        except ServiceError:  # it may still be on its way back
            if loop.time() > reachable_until:
                raise
            settled_until = loop.time() + _SETTLE_S
        else:
            is_clean = not (status.num_running or status.num_waiting or status.blocks.num_used_blocks)
            if (is_clean and status.HasField("executor")) or loop.time() > settled_until:
                return status
        await asyncio.sleep(_POLL_S)
