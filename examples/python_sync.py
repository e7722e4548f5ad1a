"""A streamed answer and a whole one: python examples/python_sync.py [HOST:PORT]."""

import sys

from everystop.client import ChatMessage, Client, Delta
from everystop.errors import ServiceError

with Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051") as client:
    for event in client.generate("The capital of France is", max_tokens=16, temperature=0):
        if isinstance(event, Delta):
            print(event.text, end="", flush=True)
    print()

    # The same seed brings the same answer, whatever else is in the batch.
    question = [ChatMessage("user", "Name a colour.")]
    completion = client.complete(question, max_tokens=16, temperature=0.8, seed=7, stop_strings=["\n"])
    print(f"{completion.text!r} ({completion.finish_reason}, {completion.timings.total_ms:.0f} ms)")

    try:
        client.complete("too hot", temperature=1000)
    except ServiceError as error:
        print(f"{error.code.name}: {error.message}")
