"""One answer on its way to its client: merging, logprobs, endings."""

import grpc
import pytest
import tokenizers

from everystop.errors import Reason, ServiceError
from everystop.plan import SamplingParams, SequenceLogprobs
from everystop.scheduler.v1 import inference_pb2 as pb
from executor_svc.mock.tokenizer import tokenizer_files
from scheduler_svc.core.request import Finish, FinishReason, Output, Request, RequestStats
from scheduler_svc.frontend.answer import AnswerText
from scheduler_svc.frontend.tokenizer import Tokenizer
from scheduler_svc.stream import MAX_DELTA_LOGPROBS, MAX_DELTA_ROWS, RequestStream

REQUEST = Request("r", [1, 2, 3], SamplingParams(), max_tokens=10_000)
STATS = RequestStats(arrival_time=10.0, first_scheduled_time=10.5, first_token_time=11.0, num_preemptions=2)
TOKENIZER = Tokenizer.from_files(tokenizer_files())


def make_stream(stop_strings=()) -> RequestStream:
    answer = AnswerText(TOKENIZER, skip_special_tokens=True, stop_strings=stop_strings, include_stop=False)
    return RequestStream(REQUEST, answer, TOKENIZER.token_bytes, clock=lambda: 12.0)


def output(text: str, finish: Finish | None = None, **fields) -> Output:
    return Output(REQUEST, list(text.encode()), finish=finish, **fields)


async def drain(stream: RequestStream) -> list[pb.GenerateResponse]:
    return [event async for event in stream.events()]


async def test_what_a_lagging_client_has_not_taken_is_merged_into_bounded_deltas():
    stream = make_stream()
    for _ in range(1000):
        stream.feed(output("a"))
        stream.digest(lambda: None)
    stream.feed(output("b", Finish(FinishReason.LENGTH, STATS)))
    stream.digest(lambda: None)
    *deltas, last = await drain(stream)
    assert [len(event.delta.token_ids) for event in deltas] == [MAX_DELTA_ROWS, 1001 - MAX_DELTA_ROWS]
    assert "".join(event.delta.text for event in deltas) == "a" * 1000 + "b"
    assert last.finished.reason == pb.FINISH_REASON_LENGTH
    assert last.finished.usage.num_output_tokens == 1001


async def test_what_was_held_back_comes_with_the_last_token_even_in_a_full_delta():
    """So that the text that a client has depends on its tokens alone, which is what resuming an answer builds on."""
    stream = make_stream(stop_strings=["</s>"])
    *characters, last = "a" * (MAX_DELTA_ROWS - 3) + "</s"
    for character in characters:
        stream.feed(output(character))
    stream.feed(output(last, Finish(FinishReason.LENGTH, STATS)))
    stream.digest(lambda: None)
    delta, finished = await drain(stream)
    assert delta.delta.text == "a" * (MAX_DELTA_ROWS - 3) + "</s"
    assert finished.HasField("finished")


async def test_the_last_event_carries_usage_and_timings():
    stream = make_stream()
    stream.feed(output("x", Finish(FinishReason.EOS, STATS, token_id=ord("x"))))
    stream.digest(lambda: None)
    finished = (await drain(stream))[-1].finished
    assert finished.reason == pb.FINISH_REASON_STOP
    assert finished.stop_token_id == ord("x")
    assert finished.usage == pb.Usage(num_prompt_tokens=3, num_output_tokens=1)
    assert finished.timings == pb.Timings(queued_ms=500, first_token_ms=1000, total_ms=2000, num_preemptions=2)


async def test_a_stop_string_takes_the_request_out_of_the_core_and_ends_the_stream():
    stream = make_stream(stop_strings=["stop"])
    taken_out = []

    def finish_in_core() -> RequestStats:
        taken_out.append(True)
        return STATS

    for character in "go stop on":
        stream.feed(output(character))
    stream.digest(finish_in_core)
    *deltas, last = await drain(stream)
    assert taken_out == [True]
    assert "".join(event.delta.text for event in deltas) == "go "
    assert bytes(deltas[0].delta.token_ids) == b"go stop"
    assert last.finished.stop_string == "stop"
    assert stream.ending is not None
    assert stream.ending.reason == "stop_string"


async def test_a_stop_string_at_the_last_token_is_the_reason_though_the_core_had_finished():
    stream = make_stream(stop_strings=["p"])
    stream.feed(output("p", Finish(FinishReason.LENGTH, STATS)))
    stream.digest(lambda: pytest.fail("the core knows it no more"))
    assert (await drain(stream))[-1].finished.stop_string == "p"


@pytest.mark.parametrize("reason", [FinishReason.EOS, FinishReason.LENGTH, FinishReason.FAILED])
async def test_a_stop_string_counts_though_a_later_output_that_waits_too_ended_the_request_in_the_core(reason):
    stream = make_stream(stop_strings=["stop"])
    stream.feed(output("stop"))
    stream.feed(output("" if reason is FinishReason.FAILED else "x", Finish(reason, STATS, message="broken")))
    stream.digest(lambda: None)  # the core knows it no more
    *deltas, last = await drain(stream)
    assert "".join(event.delta.text for event in deltas) == ""
    assert bytes(deltas[0].delta.token_ids) == b"stop"
    assert (last.finished.stop_string, last.finished.usage.num_output_tokens) == ("stop", 4)
    assert last.finished.timings.queued_ms == 500


async def test_a_stop_string_counts_though_the_core_has_forgotten_the_request():
    stream = make_stream(stop_strings=["stop"])
    stream.feed(output("stop"))
    stream.digest(lambda: None)
    *_, last = await drain(stream)
    assert last.finished.stop_string == "stop"
    assert last.finished.timings.total_ms == 0  # all it knows is when it arrived


async def test_a_failure_ends_the_stream_with_a_typed_error_after_what_came_before():
    stream = make_stream()
    stream.feed(output("a"))
    stream.feed(output("", Finish(FinishReason.FAILED, STATS, message="logits are not finite")))
    stream.digest(lambda: None)
    events = stream.events()
    assert (await anext(events)).delta.text == "a"
    with pytest.raises(ServiceError, match="logits are not finite") as caught:
        await anext(events)
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INTERNAL, Reason.EXECUTION_FAILED)


async def test_logprobs_carry_bytes_and_alternatives():
    entry = SequenceLogprobs(
        slot=0,
        is_prompt=False,
        token_ids=[97],
        logprobs=[-0.5],
        num_top=2,
        top_token_ids=[97, 98],
        top_logprobs=[-0.5, -1],
    )
    prompt = SequenceLogprobs(
        slot=0,
        is_prompt=True,
        token_ids=[2, 3],
        logprobs=[-1, -2],
        num_top=1,
        top_token_ids=[5, 6],
        top_logprobs=[0, 0],
    )
    stream = make_stream()
    stream.feed(output("a", Finish(FinishReason.LENGTH, STATS), logprobs=entry, prompt_logprobs=[prompt]))
    stream.digest(lambda: None)
    delta = (await drain(stream))[0].delta
    assert [(top.token_bytes, top.logprob) for top in delta.logprobs[0].top] == [(b"a", -0.5), (b"b", -1)]
    assert [(row.token_id, row.top[0].token_id) for row in delta.prompt_logprobs] == [(2, 5), (3, 6)]


def test_the_tokenizer_of_these_tests_is_of_bytes():
    assert tokenizers.Tokenizer.from_str(tokenizer_files()["tokenizer.json"].decode()).encode("hé").ids == [
        104,
        195,
        169,
    ]


async def test_log_probabilities_become_messages_when_they_are_written_and_a_few_at_a_time():
    """A chunk of a prompt brings thousands, and everybody else on the event loop waits while they are built."""
    num_rows, num_top = 1000, 20
    prompt = SequenceLogprobs(
        slot=0,
        is_prompt=True,
        token_ids=[index % 256 for index in range(num_rows)],
        logprobs=[-float(index) for index in range(num_rows)],
        num_top=num_top,
        top_token_ids=[index % 256 for index in range(num_rows * num_top)],
        top_logprobs=[-float(index) for index in range(num_rows * num_top)],
    )
    built = []
    stream = make_stream()
    stream._token_bytes = lambda token_id: built.append(token_id) or TOKENIZER.token_bytes(token_id)
    stream.feed(output("", prompt_logprobs=[prompt]))
    stream.feed(output("x", Finish(FinishReason.LENGTH, STATS)))
    stream.digest(lambda: None)
    assert not built
    *deltas, _ = await drain(stream)
    rows = [row for event in deltas for row in event.delta.prompt_logprobs]
    assert [row.logprob for row in rows] == prompt.logprobs
    assert [entry.logprob for row in rows for entry in row.top] == prompt.top_logprobs
    sizes = [sum(1 + len(row.top) for row in event.delta.prompt_logprobs) for event in deltas]
    assert max(sizes) <= MAX_DELTA_LOGPROBS + num_top
    assert len(deltas) <= 12
