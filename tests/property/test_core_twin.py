"""The core against an executor that knows nothing but plans, and against answers that are computed in one go.

`PlainExecutor` keeps every key and value as a fingerprint of the tokens up to it, and reads all of them back for every
token: a block that was given away too early, a token that was fed twice or to the wrong sequence, changes the answer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everystop.plan import NewSequence, SamplingParams, SequenceFailure, SequenceLogprobs, StepPlan, StepResult
from scheduler_svc.core import (
    CoreConfig,
    DuplicateRequestError,
    FinishReason,
    Output,
    Request,
    RequestTooLargeError,
    Scheduler,
)
from scheduler_svc.core.policies.priority import OVERTAKEN_PER_LEVEL

VOCAB_SIZE = 13
EOS_ID, STOP_ID = 0, 1
FAILS = -1
"""In place of a token: the executor can't compute it."""


def next_token(token_ids: list[int], seed: int) -> int:
    draw = hash((*token_ids, seed, 7)) % 100_003
    return FAILS if seed == 1 and draw % 29 == 0 else draw % VOCAB_SIZE


def whole_answer(request: Request) -> tuple[list[int], FinishReason]:
    """What a request must get, whatever happens around it."""
    token_ids = list(request.prompt_token_ids)
    answer: list[int] = []
    while True:
        token_id = next_token(token_ids + answer, request.sampling.seed)
        if token_id == FAILS:
            return answer, FinishReason.FAILED
        answer.append(token_id)
        if token_id in request.eos_token_ids:
            return answer, FinishReason.EOS
        if token_id in request.stop_token_ids:
            return answer, FinishReason.STOP_TOKEN
        if len(answer) == request.max_tokens:
            return answer, FinishReason.LENGTH


@dataclass
class PlainSeat:
    admission: NewSequence
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    decodes: bool = False


class PlainExecutor:
    """Executes plans by the letter of executor.proto, and asserts that they may be executed."""

    def __init__(self, config: CoreConfig, epoch: int) -> None:
        self.config = config
        self.epoch = epoch
        self.step_id = 0
        self.seats: dict[int, PlainSeat] = {}
        self.cache: dict[tuple[int, int], int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self.step_id += 1
        assert (plan.epoch, plan.step_id) == (self.epoch, self.step_id)
        for slot in plan.exit_slots:
            del self.seats[slot]
        for admission in plan.admissions:
            assert admission.slot not in self.seats
            assert admission.slot < self.config.max_num_seqs
            seat = PlainSeat(admission, list(admission.token_ids), list(admission.block_ids))
            self.seats[admission.slot] = seat
        for slot, block_id in zip(plan.block_slots, plan.block_ids, strict=True):
            self.seats[slot].block_ids.append(block_id)
        owned = [block_id for seat in self.seats.values() for block_id in seat.block_ids]
        assert len(set(owned)) == len(owned), "a block in two places"
        assert set(owned) <= set(range(self.config.num_blocks))
        work = {slot: 1 for slot, seat in self.seats.items() if seat.decodes and slot not in plan.idle_slots}
        for slot, num_tokens in zip(plan.chunk_slots, plan.chunk_num_tokens, strict=True):
            assert slot not in work, "a decode is named, or a prefill twice"
            assert 1 <= num_tokens <= self.config.max_prefill_chunk
            work[slot] = num_tokens
        assert (plan.num_seqs, plan.num_tokens) == (len(work), sum(work.values()))
        assert 1 <= plan.num_tokens <= self.config.max_num_batched_tokens
        result = StepResult(plan.step_id, [])
        for slot in sorted(work):
            self._compute(slot, work[slot], result)
        return result

    def _compute(self, slot: int, num_tokens: int, result: StepResult) -> None:
        seat = self.seats[slot]
        start, end = seat.num_computed, seat.num_computed + num_tokens
        assert end <= len(seat.token_ids), "computes tokens that are not there"
        for position in range(start, end):
            self.cache[self._place(seat, position)] = hash(tuple(seat.token_ids[: position + 1]))
        for position in range(end):
            assert self.cache[self._place(seat, position)] == hash(tuple(seat.token_ids[: position + 1]))
        seat.num_computed = end
        sampling = seat.admission.sampling
        prompt_rows = seat.token_ids[: seat.admission.num_prompt_tokens][start + 1 : end + 1]
        if sampling.num_prompt_logprobs is not None and prompt_rows:
            for piece in (prompt_rows[:2], prompt_rows[2:]):
                if piece:
                    result.logprobs.append(rows_about(slot, piece, is_prompt=True))
        if end == len(seat.token_ids):
            token_id = next_token(seat.token_ids, sampling.seed)
            if token_id == FAILS:
                result.failures.append(SequenceFailure(slot, "numbers that are none"))
                token_id = 0
            elif sampling.num_logprobs is not None:
                result.logprobs.append(rows_about(slot, [token_id], is_prompt=False))
            result.token_ids.append(token_id)
            seat.token_ids.append(token_id)
            seat.decodes = True

    def _place(self, seat: PlainSeat, position: int) -> tuple[int, int]:
        return seat.block_ids[position // self.config.block_size], position % self.config.block_size


def rows_about(slot: int, token_ids: list[int], *, is_prompt: bool) -> SequenceLogprobs:
    logprobs = [-float(token_id) for token_id in token_ids]
    return SequenceLogprobs(slot, is_prompt, list(token_ids), logprobs, 1, list(token_ids), logprobs)


@dataclass(eq=False)
class Life:
    """One request from its arrival on, as the client sees it."""

    request: Request
    answer: list[int] = field(default_factory=list)
    prompt_row_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    is_over: bool = False


class Ride:
    """The core, the executor and the clients together. Every event is checked when it happens."""

    def __init__(self, config: CoreConfig, batching: str, policy: str) -> None:
        self.config = config
        self.policy = policy
        self.is_static = batching == "static"
        self.core = Scheduler(config, epoch=1, policy=policy, batching=batching)
        self.executor = PlainExecutor(config, epoch=1)
        self.results: list[StepResult] = []
        self.lives: list[Life] = []
        self.departed: set[Life] = set()
        """Those that left their seat because the executor has sampled their last token."""
        self.batch: list[Life] = []

    def living(self) -> dict[str, Life]:
        return {life.request.request_id: life for life in self.lives if not life.is_over}

    def fits(self, request: Request) -> bool:
        num_tokens = len(request.prompt_token_ids) + request.max_tokens
        num_blocks = math.ceil((num_tokens - 1) / self.config.block_size)
        return num_tokens <= self.config.max_model_len and num_blocks <= self.config.num_blocks

    def add(self, request: Request) -> None:
        if not self.fits(request):
            with pytest.raises(RequestTooLargeError):
                self.core.add(request, now=0.0)
        elif request.request_id in self.living():
            with pytest.raises(DuplicateRequestError):
                self.core.add(request, now=0.0)
        else:
            self.core.add(request, now=0.0)
            self.lives.append(Life(request))

    def cancel(self, choice: int) -> None:
        living = list(self.living().values())
        if living:
            life = living[choice % len(living)]
            assert self.core.finish(life.request.request_id) is not None
            assert self.core.finish(life.request.request_id) is None
            life.is_over = True
            self.departed.discard(life)

    def schedule(self) -> None:
        before = {slot: (seat, self.life_of(seat)) for slot, seat in self.executor.seats.items()}
        plan = self.core.schedule(now=0.0)
        if plan is None:
            # Only those may be left that have all their tokens scheduled.
            assert set(self.living().values()) == self.departed | {
                life for seat, life in before.values() if life is not None and self.is_complete(seat, life)
            }
            return
        self.results.append(self.executor.execute(plan))
        self.check_moves(plan, before)

    def apply(self) -> None:
        outputs = self.core.apply(self.results.pop(0), now=0.0)
        assert len({output.request.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            self.receive(output)

    def lose_executor(self, num_blocks: int | None) -> None:
        epoch = self.executor.epoch + 1
        # Not a loss: who is given up after many of those is a matter of its own.
        outputs = self.core.reset(epoch, num_blocks, is_loss=False)
        self.config = self.core.config
        assert num_blocks in (None, self.config.num_blocks)
        self.executor = PlainExecutor(self.config, epoch)
        self.results.clear()
        self.departed.clear()
        too_large = [life for life in self.lives if not life.is_over and not self.fits(life.request)]
        assert [output.request for output in outputs] == [life.request for life in too_large]
        assert all(output.finish and output.finish.reason is FinishReason.FAILED for output in outputs)
        for life in too_large:
            life.is_over = True

    def check_integrity(self) -> None:
        self.core.check_integrity()
        assert self.core.requests.keys() == self.living().keys()
        assert self.core.num_in_flight_steps == len(self.results)
        assert self.core.num_running <= self.config.max_num_seqs

    def go_on(self, num_steps: int, max_in_flight: int) -> None:
        for _ in range(num_steps):
            if not self.living():
                break
            self.schedule()
            self.check_integrity()
            if self.results and (len(self.results) == max_in_flight or self.core.num_running == 0):
                self.apply()
                self.check_integrity()

    def go_on_to_the_end(self) -> None:
        self.go_on(num_steps=3000, max_in_flight=2)
        for life in self.lives:
            assert life.is_over
            if life.reason is not None:
                assert (life.answer, life.reason) == whole_answer(life.request)
                if life.request.sampling.num_prompt_logprobs is not None and life.answer:
                    assert life.prompt_row_ids == life.request.prompt_token_ids[1:]
        assert (self.core.num_running, self.core.num_waiting, self.core.num_used_blocks) == (0, 0, 0)

    def receive(self, output: Output) -> None:
        life = self.living()[output.request.request_id]
        assert output.request is life.request, "a token of an older request with this id"
        sampling = life.request.sampling
        life.answer += output.token_ids
        assert life.answer == whole_answer(life.request)[0][: len(life.answer)]
        assert (output.logprobs is not None) == bool(sampling.num_logprobs is not None and output.token_ids)
        for rows in output.prompt_logprobs:
            assert rows == rows_about(rows.slot, rows.token_ids, is_prompt=True)
            life.prompt_row_ids += rows.token_ids
        assert life.prompt_row_ids == life.request.prompt_token_ids[1 : len(life.prompt_row_ids) + 1]
        if output.finish is not None:
            life.is_over, life.reason = True, output.finish.reason
            self.departed.discard(life)

    def life_of(self, seat: PlainSeat) -> Life | None:
        """Whose seat it is; None when that request is over."""
        life = self.living().get(seat.admission.request_id)
        owns = life is not None and life.request.sampling is seat.admission.sampling
        return life if owns else None

    def turn(self, life: Life) -> tuple[int, int]:
        """The place in the line; smaller goes first."""
        arrival = self.lives.index(life)
        lead = OVERTAKEN_PER_LEVEL * -life.request.priority if self.policy == "priority" else 0
        return arrival - lead, arrival

    def is_complete(self, seat: PlainSeat, life: Life) -> bool:
        return len(seat.token_ids) == len(life.request.prompt_token_ids) + life.request.max_tokens

    def check_moves(self, plan: StepPlan, before: dict[int, tuple[PlainSeat, Life | None]]) -> None:
        """Whether the right ones left, went on and boarded, by brute force over all requests."""
        victims: list[tuple[Life, PlainSeat]] = []
        for slot, (seat, life) in before.items():
            left = slot in plan.exit_slots
            # NOTE: `before` holds seats as they were; those that stayed have computed one more step by now.
            if life is None:
                assert left, "a request that is over keeps its seat"
            elif left and self.is_complete(seat, life):
                self.departed.add(life)
            elif left:
                victims.append((life, seat))
        admitted = [self.living()[admission.request_id] for admission in plan.admissions]
        self.departed -= set(admitted)
        seated = {life for seat in self.executor.seats.values() if (life := self.life_of(seat)) is not None}
        assert len(seated) == len(self.executor.seats) == self.core.num_running
        waiting = [life for life in self.lives if not life.is_over and life not in seated | self.departed]
        line = sorted(waiting, key=self.turn)
        num_used = sum(len(seat.block_ids) for seat in self.executor.seats.values())
        assert self.core.num_used_blocks == num_used
        num_free = self.config.num_blocks - num_used
        reserve = math.ceil(self.config.watermark * self.config.num_blocks)

        if victims:
            last_turn = max(self.turn(life) for life in seated)
            first_victim, its_seat = min(victims, key=lambda victim: self.turn(victim[0]))
            assert self.turn(first_victim) > last_turn, "one that goes first was thrown out"
            assert num_free <= len(its_seat.block_ids), "one too many was thrown out"
            assert not admitted, "boards into blocks that were taken from another"
        if admitted:
            if self.policy == "fcfs":
                assert all(self.turn(life) < self.turn(admitted[-1]) for life in seated - {admitted[-1]})
            assert admitted == sorted(admitted, key=self.turn)
            assert all(self.turn(life) > self.turn(admitted[-1]) for life in line), "overtaken"
            assert len(seated) == 1 or num_free >= reserve, "boards below the watermark"
        if self.is_static and admitted:
            if len(seated) == len(admitted):
                self.batch = sorted({*admitted, *line}, key=self.turn)[: self.config.max_num_seqs]
            assert set(admitted) <= set(self.batch), "boards a batch that has left"
        elif line and not self.is_static and not victims:
            num_needed = math.ceil(
                (len(line[0].request.prompt_token_ids) + len(line[0].answer)) / self.config.block_size
            )
            assert (
                plan.num_tokens == self.config.max_num_batched_tokens
                or len(seated) == self.config.max_num_seqs
                or num_free - num_needed < reserve
            ), "the head of the line could have boarded"


@st.composite
def core_configs(draw: st.DrawFn) -> CoreConfig:
    max_num_seqs = draw(st.integers(1, 5))
    return CoreConfig(
        block_size=draw(st.integers(1, 3)),
        num_blocks=draw(st.integers(4, 12)),
        vocab_size=VOCAB_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 8)),
        max_model_len=20,
        max_prefill_chunk=draw(st.integers(1, 6)),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1, 0.3])),
    )


request_ids = st.sampled_from("abcdefgh")
end_ids = st.sampled_from([frozenset[int](), frozenset({EOS_ID}), frozenset({STOP_ID})])
requests = st.builds(
    Request,
    request_id=request_ids,
    prompt_token_ids=st.lists(st.integers(2, VOCAB_SIZE - 1), min_size=1, max_size=7),
    sampling=st.builds(
        SamplingParams,
        seed=st.integers(0, 9),
        num_logprobs=st.sampled_from([None, 1]),
        num_prompt_logprobs=st.sampled_from([None, 1]),
    ),
    max_tokens=st.integers(1, 14),
    eos_token_ids=end_ids,
    stop_token_ids=end_ids,
    priority=st.integers(-1, 1),
)
going_on = st.builds(lambda *args: lambda ride: ride.go_on(*args), st.integers(1, 12), st.integers(1, 4))
adding = st.builds(lambda request: lambda ride: ride.add(request), requests)
cancelling = st.builds(lambda choice: lambda ride: ride.cancel(choice), st.integers(0, 7))
losing = st.builds(lambda num_blocks: lambda ride: ride.lose_executor(num_blocks), st.sampled_from([None, None, 4, 12]))
weights = {going_on: 4, adding: 7, cancelling: 1, losing: 1}
events = st.sampled_from([event for event, weight in weights.items() for _ in range(weight)]).flatmap(
    lambda event: event
)


@settings(max_examples=120, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    core_configs(),
    st.sampled_from(["continuous", "continuous", "static"]),
    st.sampled_from(["fcfs", "priority"]),
    st.lists(events, min_size=20, max_size=30),
)
def test_every_request_gets_its_own_answer_once(
    config: CoreConfig, batching: str, policy: str, events: list[Callable[[Ride], None]]
) -> None:
    ride = Ride(config, batching, policy)
    for event in events:
        event(ride)
        ride.check_integrity()
    ride.go_on_to_the_end()
