"""What a client has of one answer, so that it can ask for the rest when the stream breaks."""

from __future__ import annotations

from array import array
from dataclasses import replace

import grpc

from everystop.client.events import Accepted, Delta, Event, Finished, event_from_response
from everystop.errors import Reason, ServiceError
from everystop.scheduler.v1 import inference_pb2 as pb


class AnswerSoFar:
    """Makes one stream of events out of several calls: each goes on where the one before it broke off."""

    def __init__(self, request: pb.GenerateRequest) -> None:
        self.has_finished = False
        self._request = request
        self._accepted: Accepted | None = None
        self._token_ids = array("I")
        self._num_prompt_logprobs = 0
        self._num_old_prompt_logprobs = 0
        """Those that the call at hand is going to repeat."""

    def next_request(self) -> pb.GenerateRequest:
        """The request for all that is still to come."""
        if self._accepted is None:
            return self._request
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.request_id = self._accepted.request_id
        request.sampling.seed = self._accepted.seed
        request.resume.token_ids.extend(self._token_ids)
        return request

    def take(self, response: pb.GenerateResponse) -> Event | None:
        """The event in `response`, as far as it is new; None when nothing is.

        Raises ServiceError FAILED_PRECONDITION when the scheduler that came back reads the prompt in another way.
        """
        event = event_from_response(response)
        match event:
            case Accepted():
                return self._take_accepted(event)
            case Delta():
                return self._take_delta(event)
            case Finished():
                self.has_finished = True
        return event

    def _take_accepted(self, accepted: Accepted) -> Accepted | None:
        if self._accepted is None:
            self._accepted = accepted
            return accepted
        if accepted.num_prompt_tokens != self._accepted.num_prompt_tokens:
            message = (
                f"the prompt had {self._accepted.num_prompt_tokens} tokens when the answer began and has "
                f"{accepted.num_prompt_tokens} now: another model is being served"
            )
            raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, Reason.MODEL_CHANGED, message)
        # Only an answer that broke before its first token begins again with its prompt.
        self._num_old_prompt_logprobs = 0 if self._token_ids else self._num_prompt_logprobs
        return None

    def _take_delta(self, delta: Delta) -> Delta | None:
        self._token_ids.extend(delta.token_ids)
        if self._num_old_prompt_logprobs:
            num_old = min(self._num_old_prompt_logprobs, len(delta.prompt_logprobs))
            self._num_old_prompt_logprobs -= num_old
            delta = replace(delta, prompt_logprobs=delta.prompt_logprobs[num_old:])
        self._num_prompt_logprobs += len(delta.prompt_logprobs)
        return delta if delta.token_ids or delta.text or delta.prompt_logprobs else None
