"""Both clients against a real scheduler with the mock executor."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest

from everystop.client import (
    Accepted,
    AsyncClient,
    ChatMessage,
    Client,
    Delta,
    Finished,
    FinishReason,
    Prompt,
    TokenLogprobs,
)
from everystop.errors import Reason, ServiceError
from everystop.testing import serve_mock

PROMPTS: list[Prompt] = ["Hello", [72, 101, 108], [ChatMessage("user", "Hello")]]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serve_mock() as running:
        yield running.address


async def test_both_clients_get_the_same_answers(address: str) -> None:
    with Client(address) as client:
        one_by_one = [client.complete(prompt, max_tokens=20, temperature=0.8, seed=3) for prompt in PROMPTS]
    async with AsyncClient(address) as client_of_many:
        answers = [client_of_many.complete(prompt, max_tokens=20, temperature=0.8, seed=3) for prompt in PROMPTS]
        at_once = await asyncio.gather(*answers)
    assert [answer.text for answer in at_once] == [answer.text for answer in one_by_one]
    assert [answer.usage.num_output_tokens for answer in at_once] == [20, 20, 20]
    assert len({answer.text for answer in at_once}) == 3


def test_streams_in_order(address: str) -> None:
    with Client(address) as client:
        accepted, *deltas, finished = client.generate("Hello", max_tokens=20, request_id="mine", seed=0, logprobs=1)
        assert isinstance(accepted, Accepted)
        assert (accepted.request_id, accepted.seed) == ("mine", 0)
        assert isinstance(finished, Finished)
        assert finished.reason is FinishReason.LENGTH
        entries: list[TokenLogprobs] = []
        token_ids: list[int] = []
        for delta in deltas:
            assert isinstance(delta, Delta)
            token_ids += delta.token_ids
            entries += delta.logprobs
        assert [entry.token_id for entry in entries] == token_ids
        assert all(len(entry.top) == 1 for entry in entries)
        assert client.detokenize(token_ids) == "".join(delta.text for delta in deltas if isinstance(delta, Delta))


def test_tokenizes_as_it_generates(address: str) -> None:
    with Client(address) as client:
        for prompt in ("Grüße", [ChatMessage("user", "Hi")]):
            tokens = client.tokenize(prompt)
            accepted = next(client.generate(prompt, max_tokens=1))
            assert isinstance(accepted, Accepted)
            assert accepted.num_prompt_tokens == len(tokens.token_ids) == len(tokens.token_bytes)


def test_a_refusal_names_the_field(address: str) -> None:
    with Client(address) as client, pytest.raises(ServiceError) as caught:
        client.complete("Hello", temperature=-1)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INVALID_ARGUMENT, Reason.INVALID_FIELD)
    assert caught.value.field == "sampling.temperature"


async def test_a_left_stream_gives_its_id_back(address: str) -> None:
    async with AsyncClient(address) as client:
        stream = client.generate("Hello", request_id="held", max_tokens=60_000, ignore_eos=True)
        await anext(stream)
        with pytest.raises(ServiceError) as caught:
            await client.complete("Hello", request_id="held", max_tokens=1)
        assert caught.value.reason is Reason.REQUEST_ID_IN_USE
        await stream.aclose()
        while (await client.get_status()).num_running:
            pass
        assert (await client.complete("Hello", request_id="held", max_tokens=1)).request_id == "held"
