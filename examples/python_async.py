"""Several answers at once: python examples/python_async.py [HOST:PORT]."""

import asyncio
import sys

from everystop.client import AsyncClient, Delta, Finished

PROMPTS = ["The capital of France is", "Continuous batching means", "Once upon a time"]


async def answer(client: AsyncClient, prompt: str) -> None:
    text = prompt
    async for event in client.generate(prompt, max_tokens=24, temperature=0, timeout=60):
        match event:
            case Delta():
                text += event.text
            case Finished():
                print(f"{text!r} ({event.reason}, {event.usage.num_output_tokens} tokens)")


async def main(address: str) -> None:
    async with AsyncClient(address) as client, asyncio.TaskGroup() as tasks:
        for prompt in PROMPTS:
            tasks.create_task(answer(client, prompt))


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
