"""An answer that breaks at any token and is resumed behind it, against the same answer left alone.

From the request to the events, over everything but the network: checks, core, seats, a backend that says what it must.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from everystop.errors import Reason, ServiceError
from everystop.plan import ExecutorInfo, ModelInfo, NewSequence, SequenceLogprobs
from everystop.scheduler.v1 import inference_pb2 as pb
from executor_svc.backend import Seat, StepBatch, StepOutput
from executor_svc.engine import run_step
from executor_svc.mock.tokenizer import TURN_END_ID, tokenizer_files
from executor_svc.plan_checks import Limits
from executor_svc.seats import Seats
from scheduler_svc.core import CoreConfig, Scheduler
from scheduler_svc.core.request import RequestStats
from scheduler_svc.frontend.tokenizer import Tokenizer
from scheduler_svc.stream import RequestStream
from scheduler_svc.validation import ServedModel, check

VOCAB_SIZE = 259
MAX_MODEL_LEN = 64
LIMITS = Limits(
    vocab_size=VOCAB_SIZE,
    block_size=4,
    num_blocks=24,
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=2,
    max_num_batched_tokens=8,
)
CONFIG = CoreConfig(
    block_size=4,
    num_blocks=24,
    vocab_size=VOCAB_SIZE,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    max_model_len=MAX_MODEL_LEN,
    max_prefill_chunk=5,
    watermark=0.0,
)


def byte_level() -> Tokenizer:
    """Token id = byte, and three special tokens."""
    return Tokenizer.from_files(tokenizer_files())


def byte_fallback() -> Tokenizer:
    """The same ids, but a run of bytes becomes text only when it ends: the very last one when the answer does."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a ": 256, "stop": 257, "</s>": TURN_END_ID}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    backend.decoder = decoders.ByteFallback()
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"}, chat_template=None)


def served(tokenizer: Tokenizer) -> ServedModel:
    model = ModelInfo("said", "f", VOCAB_SIZE, (TURN_END_ID,), "d")
    executor = ExecutorInfo(1, model, 4, 24, MAX_MODEL_LEN, 2, 8, "said", "cpu", "float32")
    return ServedModel(executor, tokenizer, MAX_MODEL_LEN)


MODELS = {make.__name__: served(make()) for make in (byte_level, byte_fallback)}


class SaidBackend:
    """Says the tokens that it is told: `said[i]` is token i of the answer. Remembers who was admitted."""

    def __init__(self, said: Sequence[int]) -> None:
        self._said = said

    def execute(self, batch: StepBatch) -> StepOutput:
        token_ids, logprobs = [], []
        for scheduled in batch.scheduled:
            seat, sampling = scheduled.seat, scheduled.seat.sampling
            if sampling.num_prompt_logprobs is not None:
                first = seat.num_computed_tokens + 1
                prompt_token_ids = seat.token_ids[: seat.num_prompt_tokens]
                rows = prompt_token_ids[first : first + scheduled.num_tokens]
                if rows:
                    logprobs.append(_rows(seat, first, rows, sampling.num_prompt_logprobs, is_prompt=True))
            if scheduled.samples:
                index = len(seat.token_ids) - seat.num_prompt_tokens
                token_ids.append(self._said[index])
                if sampling.num_logprobs is not None:
                    logprobs.append(_rows(seat, index, token_ids[-1:], sampling.num_logprobs, is_prompt=False))
        return StepOutput(token_ids, logprobs)


def _rows(seat: Seat, first: int, token_ids: list[int], num_top: int, *, is_prompt: bool) -> SequenceLogprobs:
    """Numbers that tell positions and tokens apart."""
    logprobs = [-(first + row) - token_id / 1024 for row, token_id in enumerate(token_ids)]
    top = [rank for _ in token_ids for rank in range(num_top)]
    return SequenceLogprobs(seat.slot, is_prompt, token_ids, logprobs, num_top, top, [-rank / 2 for rank in top])


@dataclass
class Played:
    deltas: list[pb.Delta] = field(default_factory=list)
    finished: pb.Finished | None = None
    admissions: list[NewSequence] = field(default_factory=list)
    num_steps: int = 0

    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]


async def play(
    request: pb.GenerateRequest, said: Sequence[int], model: ServedModel, loss_at: int | None = None
) -> Played:
    """One stream; its executor is lost before step `loss_at`."""
    generation = await check(request, model)
    stream = RequestStream(generation.request, generation.answer, model.tokenizer.token_bytes, clock=lambda: 0.0)
    events, played = stream.events(), Played()
    if generation.has_ended:
        stream.finish_at_once(RequestStats(arrival_time=0.0))
    core, seats, backend = Scheduler(CONFIG, epoch=1), Seats(LIMITS, 1), SaidBackend(said)
    if not generation.has_ended:
        core.add(generation.request, now=0.0)
    while stream.ending is None:
        if played.num_steps == loss_at:
            seats = Seats(LIMITS, 2)
            core.reset(2)
        plan = core.schedule(now=0.0)
        assert plan is not None
        played.num_steps += 1
        played.admissions += plan.admissions
        for output in core.apply(run_step(seats, backend, plan), now=0.0):
            stream.feed(output)
            stream.digest(lambda: core.finish(generation.request.request_id))
            played.deltas.append((await anext(events)).delta)
    played.finished = (await anext(events)).finished
    assert [event async for event in events] == []
    assert core.requests == {}
    core.check_integrity()
    return played


texts = st.lists(
    st.sampled_from(["a", "b", "\n", "</s", "stop", "👩‍🚀", "ไทย", "é"]),
    min_size=1,
    max_size=6,
).map("".join)


@st.composite
def answers(draw: Callable[..., Any]) -> tuple[list[int], pb.GenerateRequest]:
    """What the backend says, and a request that it may end in any way."""
    said = list(draw(texts).encode())
    for token_id in draw(st.lists(st.sampled_from([256, 257, 0xF0, 0x9F, TURN_END_ID]), max_size=3)):
        said.insert(draw(st.integers(0, len(said))), token_id)
    said = said[:30]
    request = pb.GenerateRequest(request_id="r")
    request.token_ids.ids.extend(draw(st.lists(st.integers(0, 255), min_size=1, max_size=12)))
    request.stop.max_tokens = len(said)
    request.stop.ignore_eos = draw(st.booleans())
    request.stop.include_stop = draw(st.booleans())
    request.stop.stop_strings.extend(
        draw(st.lists(st.sampled_from(["stop", "a b", "</s>", "🚀", "b\n", "ย"]), max_size=2))
    )
    request.stop.stop_token_ids.extend(draw(st.lists(st.sampled_from([*said, 257]), max_size=1)))
    request.sampling.CopyFrom(
        draw(
            st.sampled_from(
                [
                    pb.SamplingParams(temperature=0.0, seed=1),
                    pb.SamplingParams(temperature=0.7, seed=2**64 - 1, repetition_penalty=1.5, logit_bias={3: 2.0}),
                    pb.SamplingParams(seed=0, presence_penalty=0.5, frequency_penalty=-0.5, banned_token_ids=[1]),
                ]
            )
        )
    )
    if draw(st.booleans()):
        request.output.logprobs = draw(st.integers(0, 2))
    if draw(st.booleans()):
        request.output.prompt_logprobs = draw(st.integers(0, 2))
    request.output.skip_special_tokens = draw(st.booleans())
    return said, request


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(answer=answers(), loss_at=st.none() | st.integers(0, 12))
def test_every_rest_is_as_if_nothing_had_happened(
    name: str, answer: tuple[list[int], pb.GenerateRequest], loss_at: int | None
) -> None:
    asyncio.run(_check_every_rest(*answer, MODELS[name], loss_at))


async def _check_every_rest(
    said: list[int], request: pb.GenerateRequest, model: ServedModel, loss_at: int | None
) -> None:
    whole = await play(request, said, model)
    token_deltas = [delta for delta in whole.deltas if delta.token_ids]
    token_ids = whole.token_ids()
    assert len(token_deltas) == len(token_ids), "one delta for each token: there is a rest behind each"
    assert whole.finished is not None
    for num_tokens in range(1, len(token_ids) + 1):
        resumed = pb.GenerateRequest()
        resumed.CopyFrom(request)
        resumed.resume.token_ids.extend(token_ids[:num_tokens])
        rest = await play(resumed, said, model, loss_at)
        assert rest.deltas == token_deltas[num_tokens:]
        assert rest.finished is not None
        assert rest.finished.usage == whole.finished.usage
        assert rest.finished.reason == whole.finished.reason
        assert rest.finished.WhichOneof("matched_stop") == whole.finished.WhichOneof("matched_stop")
        assert (rest.finished.stop_string, rest.finished.stop_token_id) == (
            whole.finished.stop_string,
            whole.finished.stop_token_id,
        )
        _check_admission(rest, whole, token_ids[:num_tokens])


def _check_admission(rest: Played, whole: Played, answer: list[int]) -> None:
    """The executor is told what it would be told after a preemption, so index, seed, penalties, min_tokens go on."""
    if not rest.deltas:
        assert rest.num_steps == 0, "what has ended needs no executor"
        return
    first = whole.admissions[0]
    num_blocks = CONFIG.num_blocks_for(len(first.token_ids) + len(answer))
    assert rest.admissions[0] == replace(
        first,
        token_ids=[*first.token_ids, *answer],
        block_ids=list(range(num_blocks)),
        sampling=replace(first.sampling, num_prompt_logprobs=None),
    )


def request_for(said: str, **resumption: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r",
        token_ids=pb.TokenIds(ids=[1]),
        stop=pb.StopConditions(max_tokens=len(said.encode()), stop_strings=["stop"]),
        sampling=pb.SamplingParams(temperature=0.0, seed=1),
        resume=pb.Resume(**resumption),
    )


async def refusal(request: pb.GenerateRequest) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await check(request, MODELS["byte_level"])
    assert caught.value.reason is Reason.INVALID_FIELD
    return caught.value


async def test_a_stop_token_without_its_text_completes_no_stop_string() -> None:
    request = request_for("go stop")
    request.sampling.seed = 0
    request.stop.stop_token_ids.append(ord("p"))
    await _check_every_rest(list(b"go stop"), request, MODELS["byte_level"], loss_at=None)


async def test_tokens_behind_the_end_are_refused() -> None:
    error = await refusal(request_for("go stop it", token_ids=b"go stop it"))
    assert (error.field, str(error)) == (
        "resume.token_ids",
        "resume.token_ids: has 10 tokens, but the answer ended with token number 7",
    )
    error = await refusal(request_for("go on", token_ids=[TURN_END_ID, 1]))
    assert "ended with token number 1" in str(error)


async def test_more_tokens_than_the_answer_may_have_are_refused() -> None:
    error = await refusal(request_for("go", token_ids=b"go!"))
    assert (error.field, str(error)) == (
        "resume.token_ids",
        "resume.token_ids: has 3 tokens, at most max_tokens, which is 2",
    )


async def test_tokens_that_no_model_said_are_refused() -> None:
    error = await refusal(request_for("go on", token_ids=[VOCAB_SIZE]))
    assert error.field == "resume.token_ids"


@pytest.mark.parametrize("temperature", [None, 0.5])
async def test_a_drawn_answer_needs_its_seed(temperature: float | None) -> None:
    request = request_for("go on", token_ids=b"go")
    request.sampling.CopyFrom(pb.SamplingParams(temperature=temperature))
    assert (await refusal(request)).field == "sampling.seed"
    request.sampling.seed = 0
    assert not (await check(request, MODELS["byte_level"])).has_ended
    del request.resume.token_ids[:]
    request.sampling.ClearField("seed")
    assert not (await check(request, MODELS["byte_level"])).has_ended  # nothing was drawn yet


async def test_a_long_replay_gives_everything_else_its_turn() -> None:
    said = "x" * 60
    many = [ord("x")] * 20_000
    model = replace(MODELS["byte_level"], max_model_len=30_000)
    request = request_for(said, token_ids=many)
    request.stop.max_tokens = 25_000
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    others = asyncio.create_task(count_turns())
    await check(request, model)
    others.cancel()
    assert num_turns >= 20_000 // 1024
