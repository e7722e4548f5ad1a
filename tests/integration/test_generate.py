"""Requests over real gRPC: client, scheduler and mock executor."""

import asyncio

import grpc
import pytest

from everystop.client import AsyncClient, Client, Delta, FinishReason
from everystop.errors import Reason, ServiceError
from everystop.testing import serve_mock


@pytest.fixture(scope="module")
def server():
    with serve_mock() as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with Client(server.address) as connected:
        yield connected


def refusal(call) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        call()
    return caught.value


def test_the_stream_is_accepted_then_deltas_then_finished(client):
    events = list(client.generate("hello", max_tokens=5, request_id="one", seed=7, temperature=0.5))
    kinds = [type(event).__name__ for event in events]
    assert kinds[0] == "Accepted"
    assert kinds[-1] == "Finished"
    assert set(kinds[1:-1]) == {"Delta"}
    accepted, finished = events[0], events[-1]
    assert (accepted.request_id, accepted.num_prompt_tokens, accepted.seed) == ("one", 5, 7)
    assert finished.reason is FinishReason.LENGTH
    assert (finished.usage.num_prompt_tokens, finished.usage.num_output_tokens) == (5, 5)
    assert 0 <= finished.timings.queued_ms <= finished.timings.first_token_ms <= finished.timings.total_ms


def test_deltas_put_together_are_the_whole_decoded_at_once(client):
    answer = client.complete("tell me", max_tokens=300, temperature=1.0, seed=3)
    assert len(answer.token_ids) == 300
    assert answer.text == client.detokenize(answer.token_ids)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_same_tokens_whatever_shares_the_batch(client, server, temperature):
    alone = client.complete("the same", max_tokens=40, temperature=temperature, seed=11)

    async def beside_others() -> tuple[int, ...]:
        async with AsyncClient(server.address) as many:
            others = [many.complete(f"other {i}" * (i + 1), max_tokens=30 + i, seed=i) for i in range(20)]
            same = many.complete("the same", max_tokens=40, temperature=temperature, seed=11)
            return (await asyncio.gather(same, *others))[0].token_ids

    assert asyncio.run(beside_others()) == alone.token_ids


def test_temperature_zero_is_greedy_and_needs_no_seed(client):
    first = client.complete("greedy", max_tokens=20, temperature=0.0)
    second = client.complete("greedy", max_tokens=20, temperature=0.0)
    assert first.token_ids == second.token_ids


def test_a_temperature_left_out_is_not_zero(client):
    answers = {client.complete("warm", max_tokens=20).token_ids for _ in range(4)}
    assert len(answers) == 4


def test_seed_zero_is_a_seed_and_a_seed_left_out_is_drawn_and_reported(client):
    zero = [client.complete("seeded", max_tokens=20, temperature=1.0, seed=0) for _ in range(2)]
    assert zero[0].token_ids == zero[1].token_ids
    assert zero[0].seed == 0
    drawn = client.complete("seeded", max_tokens=20, temperature=1.0)
    assert drawn.token_ids != zero[0].token_ids
    again = client.complete("seeded", max_tokens=20, temperature=1.0, seed=drawn.seed)
    assert again.token_ids == drawn.token_ids


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"temperature": -0.1}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"temperature": 101.0}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.5}, "sampling.top_p"),
        ({"min_p": -1.0}, "sampling.min_p"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"presence_penalty": float("inf")}, "sampling.presence_penalty"),
        ({"frequency_penalty": -101.0}, "sampling.frequency_penalty"),
        ({"logit_bias": {259: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": {1: 101.0}}, "sampling.logit_bias[1]"),
        ({"allowed_token_ids": [259]}, "sampling.allowed_token_ids"),
        ({"banned_token_ids": [1_000_000]}, "sampling.banned_token_ids"),
        ({"allowed_token_ids": [5], "banned_token_ids": [5]}, "sampling.banned_token_ids"),
        ({"banned_token_ids": list(range(259))}, "sampling.banned_token_ids"),
        ({"allowed_token_ids": [1] * 1025}, "sampling.allowed_token_ids"),
        ({"banned_token_ids": [1] * 1025}, "sampling.banned_token_ids"),
        ({"max_tokens": 0}, "stop.max_tokens"),
        ({"max_tokens": 10_000_000}, "stop.max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "stop.min_tokens"),
        ({"max_tokens": 3, "min_tokens": 2, "allowed_token_ids": [256, 258]}, "stop.min_tokens"),
        ({"min_tokens": 1, "allowed_token_ids": [7, 8], "stop_token_ids": [7, 8]}, "stop.min_tokens"),
        ({"min_tokens": 1, "allowed_token_ids": [7, 256], "banned_token_ids": [7]}, "stop.min_tokens"),
        (
            {"max_tokens": 3, "min_tokens": 1, "banned_token_ids": list(range(256)), "stop_token_ids": [257]},
            "stop.min_tokens",
        ),
        ({"stop_token_ids": [259]}, "stop.stop_token_ids"),
        ({"stop_token_ids": list(range(65))}, "stop.stop_token_ids"),
        ({"stop_strings": [""]}, "stop.stop_strings[0]"),
        ({"stop_strings": ["a", "b" * 257]}, "stop.stop_strings[1]"),
        ({"stop_strings": ["x"] * 17}, "stop.stop_strings"),
        ({"logprobs": 21}, "output.logprobs"),
        ({"prompt_logprobs": 21}, "output.prompt_logprobs"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "é"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"tenant": "x" * 129}, "tenant"),
    ],
)
def test_a_bad_field_is_refused_by_name(client, options, field):
    error = refusal(lambda: client.complete("x", **({"max_tokens": 1} | options)))
    assert (error.code, error.reason, error.field) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        Reason.INVALID_FIELD,
        field,
    )
    assert error.message.startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [([], "prompt"), ("", "prompt"), ([1, 259], "token_ids.ids"), ([{"role": "user", "content": 1}], None)],
)
def test_a_bad_prompt_is_refused_by_name(client, prompt, field):
    if field is None:
        with pytest.raises((TypeError, ServiceError)):
            client.complete(prompt, max_tokens=1)
        return
    error = refusal(lambda: client.complete(prompt, max_tokens=1))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_a_refused_request_harms_no_one(client):
    refusal(lambda: client.complete([1, 999], max_tokens=1))
    assert len(client.complete("fine", max_tokens=3).token_ids) == 3


def test_a_running_id_is_refused_and_free_again_after_the_end(client):
    stream = client.generate("long", max_tokens=50_000, request_id="mine")
    next(stream)
    error = refusal(lambda: client.complete("x", max_tokens=1, request_id="mine"))
    assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, Reason.REQUEST_ID_IN_USE)
    stream.close()
    while client.get_status().num_running:
        pass
    assert client.complete("x", max_tokens=1, request_id="mine").request_id == "mine"


def test_stop_token_and_min_tokens(client):
    plain = client.complete("stops", max_tokens=60, temperature=0.0)
    stop = plain.token_ids[10]
    first = plain.token_ids.index(stop)
    stopped = client.complete("stops", max_tokens=60, temperature=0.0, stop_token_ids=[stop])
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.matched_stop == stop
    assert stopped.token_ids == plain.token_ids[: first + 1]
    assert stopped.text == client.detokenize(plain.token_ids[:first])
    kept = client.complete("stops", max_tokens=60, temperature=0.0, stop_token_ids=[stop], include_stop=True)
    assert kept.text == client.detokenize(plain.token_ids[: first + 1])
    later = client.complete("stops", max_tokens=60, temperature=0.0, stop_token_ids=[stop], min_tokens=first + 2)
    assert len(later.token_ids) >= first + 2


@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_string(client, include_stop):
    plain = client.complete("stops", max_tokens=60, temperature=0.0)
    stop = plain.text[20:26]
    cut = plain.text.index(stop) + (len(stop) if include_stop else 0)
    answer = client.complete("stops", max_tokens=60, temperature=0.0, stop_strings=[stop], include_stop=include_stop)
    assert answer.finish_reason is FinishReason.STOP
    assert answer.matched_stop == stop
    assert answer.text == plain.text[:cut]
    assert answer.token_ids == plain.token_ids[: len(answer.token_ids)]
    assert client.detokenize(answer.token_ids).endswith(stop)


def test_an_end_alone_may_be_allowed_when_it_may_come_at_once_or_is_ignored(client):
    ended = client.complete("end", max_tokens=3, allowed_token_ids=[256])
    assert (ended.token_ids, ended.matched_stop) == ((256,), 256)
    ignored = client.complete("end", max_tokens=3, min_tokens=3, allowed_token_ids=[256], ignore_eos=True)
    assert ignored.token_ids == (256,) * 3


def test_what_is_detokenized_may_be_as_long_as_an_answer(client):
    limit = client.get_model().limits["token_ids"]
    assert limit == client.get_model().max_model_len
    assert client.detokenize([65] * limit) == "A" * limit
    error = refusal(lambda: client.detokenize([65] * (limit + 1)))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "token_ids")


def test_what_is_tokenized_may_be_as_long_as_a_prompt_and_its_answer(client):
    limit = client.get_model().max_model_len
    assert len(client.tokenize("A" * limit).token_ids) == limit
    error = refusal(lambda: client.tokenize("A" * (limit + 1)))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")
    assert f"has {limit + 1} tokens" in error.message


def test_logprobs_have_the_shapes_asked_for(client):
    answer = client.complete("probable", max_tokens=4, logprobs=3, prompt_logprobs=2, temperature=0.0)
    assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
    assert all(len(entry.top) == 3 for entry in answer.logprobs)
    assert [bytes([entry.token_id]) for entry in answer.prompt_logprobs] == [b"r", b"o", b"b", b"a", b"b", b"l", b"e"]
    assert all(len(entry.top) == 2 for entry in answer.prompt_logprobs)
    bare = client.complete("probable", max_tokens=4, logprobs=0, temperature=0.0)
    assert len(bare.logprobs) == 4
    assert not any(entry.top for entry in bare.logprobs)


def test_a_cancelled_request_gives_its_blocks_back(client):
    stream = client.generate("cancel me", max_tokens=50_000)
    next(event for event in stream if isinstance(event, Delta))
    assert client.get_status().blocks.num_used_blocks > 0
    stream.close()
    while (status := client.get_status()).num_running:
        pass
    assert status.blocks.num_used_blocks == 0


def test_a_deadline_ends_the_request_everywhere(client):
    error = refusal(lambda: client.complete("late", max_tokens=50_000, timeout=0.2))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    while (status := client.get_status()).num_running:
        pass
    assert status.blocks.num_used_blocks == 0


def test_a_slow_reader_slows_no_one_and_loses_nothing(server):
    """One client takes a message a second; the others finish at their own pace, and it gets everything, merged."""

    async def scenario() -> None:
        async with AsyncClient(server.address) as slow_client, AsyncClient(server.address) as fast_client:
            want = await fast_client.complete("slow", max_tokens=1500, temperature=0.0)
            slow = slow_client.generate("slow", max_tokens=1500, temperature=0.0)
            got = [await anext(slow)]
            fast = asyncio.gather(
                *[fast_client.complete(f"fast {i}", max_tokens=200, temperature=0.0) for i in range(8)]
            )
            while not fast.done():
                await asyncio.wait({fast}, timeout=1.0)
                got.append(await anext(slow))
            assert all(len(answer.token_ids) == 200 for answer in await fast)
            got.extend([event async for event in slow])
            token_ids = [token_id for event in got if isinstance(event, Delta) for token_id in event.token_ids]
            assert tuple(token_ids) == want.token_ids
            assert "".join(event.text for event in got if isinstance(event, Delta)) == want.text

    asyncio.run(scenario())


def test_a_request_larger_than_the_pool_is_refused_with_the_number_that_fits():
    with serve_mock(num_blocks=8, block_size=16) as small, Client(small.address) as client:
        # The last token of an answer is never computed, so it needs no room in a block.
        error = refusal(lambda: client.complete([65] * 100, max_tokens=30))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "stop.max_tokens")
        assert "at most 29" in error.message
        assert len(client.complete([65] * 100, max_tokens=29).token_ids) == 29
        error = refusal(lambda: client.complete([65] * 129, max_tokens=1))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")
        assert "at most 128" in error.message


def test_a_pool_that_must_preempt_changes_no_token():
    prompts = [f"prompt number {i} " * (1 + i % 5) for i in range(16)]

    async def answers(address: str) -> list[tuple[int, ...]]:
        async with AsyncClient(address) as client:
            calls = [client.complete(prompt, max_tokens=60, temperature=1.0, seed=5) for prompt in prompts]
            return [answer.token_ids for answer in await asyncio.gather(*calls)]

    with serve_mock() as ample, serve_mock(num_blocks=24, block_size=8) as tight:
        assert asyncio.run(answers(tight.address)) == asyncio.run(answers(ample.address))
        with Client(tight.address) as client:
            status = client.get_status()
    assert status.counters.num_preemptions > 0
    assert status.blocks.num_used_blocks == 0


def test_static_batching_gives_the_same_tokens():
    async def answers(address: str) -> list[tuple[int, ...]]:
        async with AsyncClient(address) as client:
            calls = [client.complete(f"p{i}", max_tokens=5 + 7 * i, temperature=0.0) for i in range(10)]
            return [answer.token_ids for answer in await asyncio.gather(*calls)]

    with serve_mock(batching="static", max_num_seqs=4) as static, serve_mock(max_num_seqs=4) as continuous:
        assert asyncio.run(answers(static.address)) == asyncio.run(answers(continuous.address))


def test_a_full_queue_refuses_with_a_time_to_come_back():
    with (
        serve_mock(max_waiting=1, max_num_seqs=1, mock_step_ms=20.0) as busy,
        Client(busy.address, retry=None) as client,
    ):
        running = client.generate("a", max_tokens=50_000)
        next(event for event in running if isinstance(event, Delta))
        waiting = client.generate("b", max_tokens=1)
        next(waiting)
        error = refusal(lambda: client.complete("c", max_tokens=1))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.QUEUE_FULL)
        assert error.retry_after_s is not None
        running.close()
        waiting.close()
