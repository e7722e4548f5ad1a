"""Who boards, who goes on, who leaves: one decision at every step.

There is no prefill phase and no decode phase. A sequence's `num_computed_tokens` chases its `num_tokens` under one
token budget; when it has caught up it samples a token, and so is one behind again.

Decisions run ahead of results. What is scheduled (`Seating`) is kept apart from what is observed (`Sequence`), so
that plans k + 1, k + 2, … are right before result k is in:

    schedule k      schedule k + 1     apply k             schedule k + 2    apply k + 1
    samples t       computes t,        t ends it: seat,    names the exit    the token after t
                    samples another    blocks, id free                       has no seating: dropped
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from everystop.plan import StepPlan, StepResult
from scheduler_svc.core import losses
from scheduler_svc.core.batching import BATCHINGS
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.errors import RequestTooLargeError, ResultMismatchError
from scheduler_svc.core.outputs import fail, take_result
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.request import Output, Request, RequestStats
from scheduler_svc.core.result_check import check_result
from scheduler_svc.core.roster import Counters, Roster
from scheduler_svc.core.sequence import Seating, Sequence
from scheduler_svc.core.step import InFlightStep, StepDraft


class Scheduler:
    """The pure core. Not thread-safe; `now` is in seconds on any one clock."""

    def __init__(self, config: CoreConfig, *, epoch: int, policy: str = "fcfs", batching: str = "continuous") -> None:
        """Raises ValueError for a policy or a batching that does not exist."""
        for name, value, known in (("policy", policy, POLICIES), ("batching", batching, BATCHINGS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        self._config = config
        self._epoch = epoch
        self._batching = BATCHINGS[batching](config.max_num_seqs)
        self._roster = Roster(config, POLICIES[policy]())
        self._last_step_id = 0
        self._in_flight: deque[InFlightStep] = deque()

    # -- requests come and go ----------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Put a request in line.

        Raises DuplicateRequestError while another with its id has not ended, RequestTooLargeError when it would not
        fit alone.
        """
        assert request.prompt_token_ids, "an empty prompt is refused at the edge"
        assert request.max_tokens > len(request.answer_token_ids), "max_tokens is checked at the edge"
        if not _fits(request, self._config):
            raise _too_large(request, self._config)
        self._roster.add(request, now)

    def finish(self, request_id: str) -> RequestStats | None:
        """End a request now: its seat, blocks and id are free, and no output comes any more. None when it has ended."""
        sequence = self._roster.requests.get(request_id)
        if sequence is None:
            return None
        self._roster.end(sequence)
        return sequence.stats()

    def reset(self, epoch: int, num_blocks: int | None = None, *, is_loss: bool = True) -> list[Output]:
        """The executor is new: forget what the last one held and had in flight, and compute all of it again.

        All that were seated wait again, in the policy's order; tokens that were delivered are not delivered again.
        `is_loss`: the last one did not leave in good order, so those in its last steps may be why (`core.losses`).
        Those that are given up end here, FAILED, and so do those that fewer blocks can't hold even alone; returns
        their outputs.
        """
        if is_loss:
            losses.count_loss(self._in_flight)
        if num_blocks is not None:
            self._config = replace(self._config, num_blocks=num_blocks)
        self._epoch = epoch
        self._last_step_id = 0
        self._in_flight.clear()
        self._roster.move_to(self._config)
        reasons = [(sequence, self._reason_to_fail(sequence)) for sequence in self._roster.requests.values()]
        return [fail(sequence, reason, self._roster) for sequence, reason in reasons if reason is not None]

    def _reason_to_fail(self, sequence: Sequence) -> str | None:
        """Why a new executor can't take a sequence; None when it can."""
        if sequence.num_losses >= self._config.max_losses:
            return f"executors were lost in {sequence.num_losses} attempts at the same step of this request"
        return None if _fits(sequence.request, self._config) else str(_too_large(sequence.request, self._config))

    # -- decide ------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step; None when there is nothing to compute. Exits alone wait for the next plan."""
        draft = StepDraft(num_tokens_left=self._config.max_num_batched_tokens)
        self._retire_complete()
        self._continue_decodes(draft)
        self._continue_prefills(draft)
        self._board_waiting(draft, now)
        return self._depart(draft) if draft.num_seqs else None

    def _retire_complete(self) -> None:
        """Those whose last token is already scheduled leave; only the result is still missing."""
        for seating in self._roster.running:
            if seating.is_complete:
                self._roster.retire(seating)

    def _continue_decodes(self, draft: StepDraft) -> None:
        """One token for each, in the policy's order; the budget is never below the number of seats."""
        for seating in self._roster.running:
            # NOTE: one that ran when the loop began may have been preempted by one before it.
            if seating.is_decoding and seating.is_seated and self._find_room(seating, draft):
                draft.compute(seating, 1)

    def _continue_prefills(self, draft: StepDraft) -> None:
        """The next chunk of each, in the policy's order; their blocks they have already.

        The budget lasts for all of them. The last one boarded when the others had taken a whole chunk each, or one that
        made them decodes, and found at least a token left; the others take no more than they did then.
        """
        for seating in self._roster.running:
            if not seating.is_decoding:
                self._compute_chunk(seating, draft)

    def _board_waiting(self, draft: StepDraft, now: float) -> None:
        """Seat the head of the line, again and again; when it can't board, nobody does."""
        # What was just taken from one of the running was taken for the others.
        if draft.has_preempted:
            return
        roster = self._roster
        self._batching.begin_boarding(roster.waiting, self.num_running)
        while roster.waiting and draft.num_tokens_left and roster.occupancy.num_free_seats:
            head = roster.waiting.head
            if not (self._batching.may_board(head) and losses.may_board(head, roster.occupancy.running)):
                return
            seating = roster.board(head, now)
            if seating is None:
                self._batching.on_out_of_blocks()
                return
            draft.admit(seating)
            self._compute_chunk(seating, draft)

    def _depart(self, draft: StepDraft) -> StepPlan:
        self._last_step_id += 1
        self._roster.counters.num_steps += 1
        self._in_flight.append(draft.to_in_flight(self._last_step_id))
        return draft.to_plan(self._last_step_id, self._epoch, self._roster.occupancy.take_exit_slots())

    def _find_room(self, seating: Seating, draft: StepDraft) -> bool:
        """Give a decode the block for its next token; False when it is preempted because there is none to be had."""
        if seating.num_computed_tokens < seating.num_block_tokens:
            return True
        while (block_id := self._roster.occupancy.append_block(seating)) is None:
            # Only those that were not served yet: a step never takes back what it has given.
            candidates = [s for s in self._roster.running if not s.is_decoding or not s.goes_before(seating)]
            victim = self._roster.policy.choose_victim(candidates)
            self._roster.preempt(victim)
            draft.has_preempted = True
            if victim is seating:
                return False
        draft.append_block(seating, block_id)
        return True

    def _compute_chunk(self, seating: Seating, draft: StepDraft) -> None:
        num_tokens_behind = seating.num_tokens - seating.num_computed_tokens
        draft.compute(seating, min(num_tokens_behind, self._config.max_prefill_chunk, draft.num_tokens_left))

    # -- apply -------------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float) -> list[Output]:
        """Count in the result of the oldest step in flight; at most one output for each request.

        Raises ResultMismatchError, and changes nothing, when `result` does not answer that step.
        """
        if not self._in_flight:
            raise ResultMismatchError(f"result of step {result.step_id}, but no step is in flight")
        check_result(result, self._in_flight[0], self._config.vocab_size)
        return take_result(self._in_flight.popleft(), result, self._roster, now)

    # -- what can be seen --------------------------------------------------------------------------------------------

    @property
    def config(self) -> CoreConfig:
        """The limits; `num_blocks` is that of the last `reset`."""
        return self._config

    @property
    def requests(self) -> Mapping[str, Sequence]:
        """Those that have not ended, by id; a view, to be read only."""
        return self._roster.requests

    @property
    def num_running(self) -> int:
        """Sequences that have a seat."""
        return len(self._roster.occupancy.running)

    @property
    def num_waiting(self) -> int:
        """Sequences in line for a seat, preempted ones included."""
        return len(self._roster.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompts and answers so far of all that wait."""
        return self._roster.waiting.num_tokens

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are not free."""
        return self._roster.occupancy.num_used_blocks

    @property
    def num_in_flight_steps(self) -> int:
        """Plans whose result has not been applied."""
        return len(self._in_flight)

    @property
    def in_flight(self) -> dict[int, list[str]]:
        """Ids of the requests that take part in each step whose result has not been applied, by step id."""
        return {
            step.step_id: [seating.sequence.request.request_id for seating in step.participants()]
            for step in self._in_flight
        }

    @property
    def counters(self) -> Counters:
        """A snapshot."""
        return replace(self._roster.counters)

    def check_integrity(self) -> None:
        """Assert that every request is in one place, and so are every seat and block."""
        self._roster.check_integrity()


def _fits(request: Request, config: CoreConfig) -> bool:
    return len(request.prompt_token_ids) + request.max_tokens <= config.max_num_tokens


def _too_large(request: Request, config: CoreConfig) -> RequestTooLargeError:
    num_prompt_tokens = len(request.prompt_token_ids)
    return RequestTooLargeError(
        request.request_id,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=request.max_tokens,
        num_blocks_needed=config.num_blocks_for(num_prompt_tokens + request.max_tokens - 1),
        num_blocks_available=config.num_blocks,
        max_model_len=config.max_model_len,
        max_tokens_that_fit=max(0, config.max_num_tokens - num_prompt_tokens),
    )
