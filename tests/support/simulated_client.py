"""Clients in memory, and the answers that the mock's language gives to them, computed in one go."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import grpc
from google.rpc import error_details_pb2, status_pb2

from everystop.errors import Reason
from everystop.plan import SamplingParams
from everystop.scheduler.v1 import inference_pb2 as pb
from executor_svc.backend import Seat
from executor_svc.mock.language import Language, Speaker
from executor_svc.mock.tokenizer import END_OF_TEXT_ID, TURN_END_ID
from scheduler_svc.servicer import Context, InferenceServicer


@dataclass(frozen=True)
class Answer:
    """What a request must get."""

    token_ids: list[int]
    text: str
    reason: pb.FinishReason.ValueType
    matched: str | int | None


def whole_answer(request: pb.GenerateRequest, eos_rate: float) -> Answer:
    """Token by token, with nobody else around. The prompt is token ids; penalties and biases are none."""
    prompt, stop = list(request.token_ids.ids), request.stop
    end_ids = {*stop.stop_token_ids, *(() if stop.ignore_eos else (END_OF_TEXT_ID, TURN_END_ID))}
    sampling = SamplingParams(
        temperature=request.sampling.temperature,
        seed=request.sampling.seed,
        min_tokens=stop.min_tokens,
        end_token_ids=tuple(sorted(end_ids)),
    )
    speaker = Speaker(Language(eos_rate), Seat(0, "", 1, prompt, len(prompt), 0, [], sampling))
    token_ids: list[int] = []
    text = ""
    while True:
        token_id = speaker.choose(len(prompt) + len(token_ids))
        assert token_id is not None
        token_ids.append(token_id)
        if token_id in end_ids:
            return Answer(token_ids, text, pb.FINISH_REASON_STOP, token_id)
        text += chr(token_id) if token_id < 256 else ""
        found = [string for string in stop.stop_strings if text.endswith(string)]
        if found:
            longest = max(found, key=len)
            return Answer(token_ids, text.removesuffix(longest), pb.FINISH_REASON_STOP, longest)
        if len(token_ids) == stop.max_tokens:
            return Answer(token_ids, text, pb.FINISH_REASON_LENGTH, None)


@dataclass(eq=False)
class Client:
    """One call of `Generate`; stands in for its `ServicerContext` too."""

    request: pb.GenerateRequest
    wanted: Answer
    reads: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it takes what is written."""
    task: asyncio.Task[None] = field(init=False)
    is_cancelled: bool = False
    is_accepted: bool = False
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: pb.Finished | None = None
    refusal: Reason | None = None
    refusal_message: str = ""

    async def call(self, servicer: InferenceServicer) -> None:
        with suppress(grpc.aio.AbortError):
            await servicer.Generate(self.request, cast("Context", self))

    # -- a ServicerContext, as far as it is needed

    async def write(self, event: pb.GenerateResponse) -> None:
        await self.reads.wait()
        self.check_open()
        kind = event.WhichOneof("event")
        assert self.is_accepted != (kind == "accepted")
        if kind == "accepted":
            self.is_accepted = True
        elif kind == "delta":
            self.token_ids += event.delta.token_ids
            self.text += event.delta.text
        else:
            self.finished = event.finished

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, bytes], ...]
    ) -> None:
        self.check_open()
        info = error_details_pb2.ErrorInfo()
        (detail,) = status_pb2.Status.FromString(trailing_metadata[0][1]).details[:1]
        assert detail.Unpack(info)
        self.refusal, self.refusal_message = Reason(info.reason), details
        raise grpc.aio.AbortError

    def add_done_callback(self, callback: Callable[[Client], None]) -> None:
        self.task.add_done_callback(lambda _task: callback(self))

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> None:
        return None

    # -- for the rules

    def cancel(self) -> None:
        self.is_cancelled = True
        self.task.cancel()

    def check_open(self) -> None:
        is_over = self.is_cancelled or self.finished is not None or self.refusal is not None
        assert not is_over, "something comes after the end"

    def check_prefix(self) -> None:
        known = len(self.request.resume.token_ids)
        assert self.token_ids == self.wanted.token_ids[known : known + len(self.token_ids)]
        assert self.wanted.text[len(self.known_text) :].startswith(self.text)
        if self.finished is not None:
            assert self.token_ids == self.wanted.token_ids[known:]
            assert self.known_text + self.text == self.wanted.text
            assert self.finished.reason == self.wanted.reason
            which = self.finished.WhichOneof("matched_stop")
            assert (getattr(self.finished, which) if which else None) == self.wanted.matched
            assert self.finished.usage.num_output_tokens == len(self.wanted.token_ids)

    @functools.cached_property
    def known_text(self) -> str:
        """What a client that resumes has got for its tokens: all but what may be the beginning of a stop string."""
        token_ids = list(self.request.resume.token_ids)
        if token_ids == self.wanted.token_ids:
            return self.wanted.text
        text = "".join(chr(token_id) for token_id in token_ids if token_id < 256)
        beginnings = [stop[:end] for stop in self.request.stop.stop_strings for end in range(1, len(stop))]
        held = [beginning for beginning in beginnings if text.endswith(beginning)]
        return text.removesuffix(max(held, key=len, default=""))

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer, at most."""
        return len(self.request.token_ids.ids) + self.request.stop.max_tokens
