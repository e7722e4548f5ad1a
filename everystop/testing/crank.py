"""The scheduler's core on the mock executor, cranked by hand: every step is one call, nothing happens in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from everystop.plan import Hello, SamplingParams, StepPlan, StepResult
from everystop.settings import ExecutorConfig, SchedulerConfig
from everystop.testing.mock_settings import mock_settings
from executor_svc.engine import run_step
from executor_svc.mock import MockBackend
from executor_svc.plan_checks import Limits
from executor_svc.seats import Seats
from scheduler_svc.core import CoreConfig, Finish, Output, Request, Scheduler

_GREEDY = SamplingParams(temperature=0.0)


def cranked(*, plan_delay: int = 0, **settings: Any) -> Crank:
    """A core and a mock executor at rest.

    Args:
        plan_delay: how many plans are sent ahead of the results; 1 is what the scheduler's loop does, 0 is plain.
        settings: those of both services by name, such as `num_blocks=8`. Time is modelled: no step really takes any.

    Raises:
        TypeError: a setting that neither service has.
        ConfigError: a value that is out of its range.

    """
    return Crank(*mock_settings(settings), plan_delay=plan_delay)


@dataclass(frozen=True, slots=True)
class CrankedStep:
    """What one turn of the crank brought."""

    plan: StepPlan | None
    """The plan that was sent; None when there was nothing to compute."""
    result: StepResult | None
    """Of the oldest plan on its way; None while there are too few."""
    outputs: list[Output]


class Crank:
    """Made by `cranked`. Core and seats check their integrity, and the mock the paging, at every step."""

    def __init__(self, scheduler_config: SchedulerConfig, executor_config: ExecutorConfig, *, plan_delay: int) -> None:
        self.now = 0.0
        """The time that the core is told, in seconds; each step moves it on as far as the mock's model says."""
        self._step_s = executor_config.mock_step_ms / 1e3
        self._token_s = executor_config.mock_token_us / 1e6
        self._backend = MockBackend(replace(executor_config, mock_step_ms=0.0, mock_token_us=0.0))
        self._plan_delay = plan_delay
        self._plans: deque[StepPlan] = deque()
        self._epoch = 1
        info = self._backend.info
        self._limits = Limits.of(info, Hello(scheduler_config.max_num_seqs, scheduler_config.max_num_batched_tokens))
        self._seats = Seats(self._limits, self._epoch)
        core_config = CoreConfig(
            block_size=info.block_size,
            num_blocks=info.num_blocks,
            vocab_size=info.model.vocab_size,
            max_num_seqs=scheduler_config.max_num_seqs,
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            max_prefill_chunk=scheduler_config.max_prefill_chunk,
            watermark=scheduler_config.watermark,
        )
        self.scheduler = Scheduler(
            core_config, epoch=self._epoch, policy=scheduler_config.policy, batching=scheduler_config.batching
        )
        """The core itself."""
        self._token_ids: dict[str, list[int]] = {}
        self._finishes: dict[str, Finish] = {}

    def add(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 16,
        request_id: str | None = None,
        sampling: SamplingParams = _GREEDY,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        tenant: str = "",
    ) -> str:
        """Put a request in line and return its id. Text is taken as its UTF-8 bytes, which are the mock's token ids.

        Raises what `Scheduler.add` does.
        """
        request_id = f"request-{len(self._token_ids)}" if request_id is None else request_id
        eos_token_ids = frozenset(() if ignore_eos else self._backend.info.model.eos_token_ids)
        end_token_ids = tuple(sorted({*eos_token_ids, *stop_token_ids}))
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt.encode() if isinstance(prompt, str) else prompt),
            sampling=replace(sampling, end_token_ids=end_token_ids),
            max_tokens=max_tokens,
            eos_token_ids=eos_token_ids,
            stop_token_ids=frozenset(stop_token_ids),
            priority=priority,
            tenant=tenant,
        )
        self.scheduler.add(request, self.now)
        self._token_ids[request_id] = []
        self._finishes.pop(request_id, None)
        return request_id

    def cancel(self, request_id: str) -> None:
        """End a request; no more tokens come."""
        self.scheduler.finish(request_id)

    def step(self) -> CrankedStep:
        """Schedule a plan; then run the oldest, once more than `plan_delay` of them, or no new ones, are there."""
        plan = self.scheduler.schedule(self.now)
        if plan is not None:
            self._plans.append(plan)
        result, outputs = None, []
        if self._plans and (plan is None or len(self._plans) > self._plan_delay):
            result = self._run_oldest()
            outputs = self.scheduler.apply(result, self.now)
            self._record(outputs)
        self.scheduler.check_integrity()
        return CrankedStep(plan, result, outputs)

    def run(self, *, max_steps: int = 100_000) -> int:
        """Step until nothing is left to do; returns how many steps that took."""
        for num_steps in range(max_steps):
            step = self.step()
            if step.plan is None and step.result is None:
                return num_steps
        raise AssertionError(f"requests are still there after {max_steps} steps")

    def restart_executor(self) -> None:
        """The executor is gone with all that it knew, and a new one is there."""
        self._epoch += 1
        self._plans.clear()
        self._backend.reset()
        self._seats = Seats(self._limits, self._epoch)
        self._record(self.scheduler.reset(self._epoch))

    def tokens(self, request_id: str) -> list[int]:
        """What a request has been answered so far."""
        return self._token_ids[request_id]

    def finish(self, request_id: str) -> Finish | None:
        """How a request ended; None while it has not, and for one that was cancelled."""
        return self._finishes.get(request_id)

    def _run_oldest(self) -> StepResult:
        plan = self._plans.popleft()
        result = run_step(self._seats, self._backend, plan)
        self._seats.check_integrity()
        self.now += self._step_s + self._token_s * plan.num_tokens
        return result

    def _record(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            request_id = output.request.request_id
            self._token_ids[request_id].extend(output.token_ids)
            if output.finish is not None:
                self._finishes[request_id] = output.finish
