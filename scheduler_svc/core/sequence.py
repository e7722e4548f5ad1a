"""A request on its way: what has been observed of it, and what has been scheduled for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from everystop.plan import NewSequence, SequenceLogprobs
from scheduler_svc.core.request import FinishReason, Request, RequestStats


@dataclass(slots=True, eq=False)
class Sequence:
    """A request that has not ended, with the tokens that results have brought.

    It waits (`seating` is None), runs (`seating.is_seated`), or has left its seat because its last token is scheduled,
    with results still on the way.
    """

    request: Request
    arrival_index: int
    """Counts up; unlike `arrival_time` never equal for two sequences."""
    arrival_time: float
    token_ids: list[int] = field(init=False)
    """Prompt and answer so far, as observed."""
    max_num_tokens: int = field(init=False)
    """Prompt and answer when it ends by length."""
    order: tuple[float, ...] = ()
    """Its place among the waiting and the running: smaller goes first."""
    seating: Seating | None = None
    num_seatings: int = 0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_losses: int = 0
    """Executors that were lost in steps that it took part in, since it last got further than ever before."""
    _num_computed_tokens: int = 0
    """The most tokens that results said were computed, in any attempt."""
    _num_prompt_logprobs: int = 0
    """Rows of prompt log-probabilities taken so far; row i is about prompt token i + 1."""

    def __post_init__(self) -> None:
        prompt_token_ids = self.request.prompt_token_ids
        self.token_ids = [*prompt_token_ids, *self.request.answer_token_ids]
        self.max_num_tokens = len(prompt_token_ids) + self.request.max_tokens

    def sit_down(self, slot: int, block_ids: list[int], block_size: int, now: float) -> Seating:
        """Begin a new attempt in `slot`, with blocks for all its tokens."""
        self.num_seatings += 1
        if self.first_scheduled_time is None:
            self.first_scheduled_time = now
        num_tokens = len(self.token_ids)
        self.seating = Seating(
            sequence=self,
            slot=slot,
            attempt=self.num_seatings,
            num_known_tokens=num_tokens,
            num_tokens=num_tokens,
            block_ids=block_ids,
            num_block_tokens=len(block_ids) * block_size,
        )
        return self.seating

    def drop_seating(self) -> None:
        """Forget the attempt; what it computed has to be computed again."""
        assert self.seating is not None
        self.num_recomputed_tokens += self.seating.num_computed_tokens
        self.seating = None

    def take_token(self, token_id: int, now: float) -> FinishReason | None:
        """Append an observed token; why the sequence ends with it, or None."""
        self.token_ids.append(token_id)
        self.num_losses = 0
        if self.first_token_time is None:
            self.first_token_time = now
        return self.request.finish_reason(token_id, len(self.token_ids) - len(self.request.prompt_token_ids))

    def take_chunk(self, num_computed_tokens: int) -> None:
        """Note that a result said that so many tokens are computed."""
        if num_computed_tokens > self._num_computed_tokens:
            self._num_computed_tokens = num_computed_tokens
            self.num_losses = 0

    def take_prompt_logprobs(self, start: int, rows: SequenceLogprobs) -> SequenceLogprobs | None:
        """What is new in `rows`, which begin with row `start`; None when an earlier attempt has brought them all."""
        num_old_rows = self._num_prompt_logprobs - start
        assert num_old_rows >= 0, "chunks of an attempt arrive in order"
        if num_old_rows >= len(rows.token_ids):
            return None
        self._num_prompt_logprobs = start + len(rows.token_ids)
        return SequenceLogprobs(
            slot=rows.slot,
            is_prompt=True,
            token_ids=rows.token_ids[num_old_rows:],
            logprobs=rows.logprobs[num_old_rows:],
            num_top=rows.num_top,
            top_token_ids=rows.top_token_ids[num_old_rows * rows.num_top :],
            top_logprobs=rows.top_logprobs[num_old_rows * rows.num_top :],
        )

    def stats(self) -> RequestStats:
        """What it went through so far."""
        return RequestStats(
            arrival_time=self.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
            num_attempts=self.num_seatings,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
        )


@dataclass(slots=True, eq=False)
class Seating:
    """One attempt of a sequence: all that is scheduled rather than observed.

    Preemption, a lost executor and the end of the request drop it whole. Steps in flight refer to seatings, so a late
    token of an older attempt, or of an older request with the same id, has nowhere to land.

        0              num_known_tokens      num_computed_tokens   num_tokens        num_block_tokens
        |--- sent at boarding ---|--- sampled since ---|--- to compute ---|--- room in its blocks ---|
    """

    sequence: Sequence
    slot: int
    attempt: int
    num_known_tokens: int
    """Tokens when it boarded. Until they are computed a plan must name what to compute; then it is a decode."""
    num_tokens: int
    """Tokens that the executor will have after all steps in flight: observed ones and sampled ones still on the way."""
    block_ids: list[int]
    num_block_tokens: int
    """Tokens that its blocks hold."""
    num_computed_tokens: int = 0
    """Tokens that will be computed after all steps in flight."""
    is_seated: bool = True
    """Whether it owns its slot and blocks."""

    @property
    def is_current(self) -> bool:
        """Whether its sequence still waits for what it brings."""
        return self.sequence.seating is self

    @property
    def is_decoding(self) -> bool:
        """Whether it computes its last sampled token in every step without being named."""
        return self.num_computed_tokens >= self.num_known_tokens

    @property
    def is_complete(self) -> bool:
        """Whether the last token that it may have is already scheduled."""
        return self.num_tokens == self.sequence.max_num_tokens

    def goes_before(self, other: Seating) -> bool:
        """Whether it is served before `other` when both run."""
        return self.sequence.order < other.sequence.order

    def to_new_sequence(self) -> NewSequence:
        """What the executor is told when it boards. Both lists go on growing here, so the plan gets its own."""
        request = self.sequence.request
        return NewSequence(
            slot=self.slot,
            request_id=request.request_id,
            attempt=self.attempt,
            token_ids=list(self.sequence.token_ids),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_computed_tokens=self.num_computed_tokens,
            block_ids=list(self.block_ids),
            sampling=request.sampling,
            traceparent=request.traceparent,
        )
