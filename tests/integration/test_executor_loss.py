"""The executor goes away under running streams and comes back empty: the streams pause, then go on where they were."""

import asyncio

from everystop.client import AsyncClient, Delta
from everystop.testing import serve_mock

NUM_STREAMS = 8


async def _answers(client: AsyncClient, on_first_tokens=None) -> list[tuple[int, ...]]:
    """All answers; `on_first_tokens` is awaited once every stream has begun."""
    begun = [asyncio.Event() for _ in range(NUM_STREAMS)]

    async def answer(index: int) -> tuple[int, ...]:
        token_ids: list[int] = []
        stream = client.generate(f"stream {index} " * (index + 1), max_tokens=200, temperature=index % 2, seed=index)
        async for event in stream:
            if isinstance(event, Delta):
                token_ids.extend(event.token_ids)
                begun[index].set()
        return tuple(token_ids)

    answers = asyncio.gather(*[answer(index) for index in range(NUM_STREAMS)])
    if on_first_tokens is not None:
        await asyncio.gather(*[event.wait() for event in begun])
        await on_first_tokens()
    return await answers


def test_streams_go_on_with_the_same_tokens():
    async def scenario(service) -> None:
        async with AsyncClient(service.address) as client:

            async def lose_the_executor_twice() -> None:
                for _ in range(2):
                    epoch = (await client.get_status()).executor.epoch
                    await asyncio.to_thread(service.stop_executor)
                    await asyncio.to_thread(service.start_executor)
                    while (await client.get_status()).executor.epoch in (0, epoch):
                        pass

            undisturbed = await _answers(client)
            before = await client.get_status()
            disturbed = await _answers(client, lose_the_executor_twice)
            after = await client.get_status()
        assert disturbed == undisturbed
        assert after.counters.num_executor_connections == before.counters.num_executor_connections + 2
        assert after.executor.epoch != before.executor.epoch
        assert after.blocks.num_used_blocks == 0

    with serve_mock() as service:
        asyncio.run(scenario(service))
