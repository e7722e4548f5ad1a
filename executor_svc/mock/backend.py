"""The mock as the engine sees it."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from everystop.plan import ModelInfo, SequenceFailure, SequenceLogprobs
from everystop.settings import ExecutorConfig
from executor_svc.backend import BackendInfo, ScheduledSequence, StepBatch, StepOutput
from executor_svc.mock.failures import Failure, FailureKind, parse_failures
from executor_svc.mock.language import Language, Speaker
from executor_svc.mock.paging import PagedSequence, ShadowCache
from executor_svc.mock.tokenizer import END_OF_TEXT_ID, TURN_END_ID, VOCAB_SIZE, tokenizer_files

_MAX_MODEL_LEN = 131_072
_NUM_BLOCKS = 8_192

_PACE_SLACK_S = 0.0005
"""A step that begins this soon after the last one's end is meant to follow it at once."""


@dataclass(frozen=True, slots=True)
class _MockSequence:
    speaker: Speaker
    paged: PagedSequence


class MockBackend:
    """Deterministic text, a modelled step time, failures on demand; each step checks the paging."""

    def __init__(self, config: ExecutorConfig) -> None:
        """Raises ServiceError INVALID_ARGUMENT for a `mock_fail` that can't be read."""
        self._files = tokenizer_files()
        self._info = _info(config, self._files)
        self._failures = parse_failures(config.mock_fail)
        self._step_s = config.mock_step_ms / 1e3
        self._token_s = config.mock_token_us / 1e6
        self._language = Language(config.mock_eos_rate)
        self._num_steps = 0
        self._busy_until = 0.0
        self.reset()

    @property
    def info(self) -> BackendInfo:
        """What it offers."""
        return self._info

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """The byte tokenizer, with a chat template."""
        return self._files

    def execute(self, batch: StepBatch) -> StepOutput:
        """One step. Raises AssertionError when a block table does not hold its sequence's tokens."""
        begin = time.monotonic()
        failure = self._next_failure()
        self._seat(batch)
        self._write_and_check(batch.scheduled)
        sampling = time.monotonic()
        output = self._sample(batch.scheduled, failure)
        sample_s = time.monotonic() - sampling
        self._pace(begin, sum(scheduled.num_tokens for scheduled in batch.scheduled), failure)
        forward_s = time.monotonic() - begin - sample_s
        return replace(output, forward_us=int(forward_s * 1e6), sample_us=int(sample_s * 1e6))

    def reset(self) -> None:
        """Forget every sequence and what the blocks hold. The count of steps goes on."""
        self._sequences: dict[int, _MockSequence] = {}
        self._cache = ShadowCache(self._info.num_blocks, self._info.block_size)

    def close(self) -> None:
        """Nothing is held."""

    def _next_failure(self) -> Failure | None:
        """Count the step and return how it fails, unless it fails as a whole."""
        self._num_steps += 1
        failure = self._failures.get(self._num_steps)
        match failure.kind if failure else None:
            case FailureKind.DIE:
                os.kill(os.getpid(), signal.SIGKILL)
            case FailureKind.HANG:
                threading.Event().wait()
            case FailureKind.ERROR:
                raise RuntimeError(f"step {self._num_steps} fails on demand")
        return failure

    def _seat(self, batch: StepBatch) -> None:
        for seat in batch.exited:
            del self._sequences[seat.slot]
        for seat in batch.admitted:
            self._sequences[seat.slot] = _MockSequence(Speaker(self._language, seat), self._cache.admit(seat))

    def _write_and_check(self, scheduled: list[ScheduledSequence]) -> None:
        # As in a real forward, everyone writes before anyone reads.
        for part in scheduled:
            self._cache.write(self._sequences[part.seat.slot].paged, part.seat, part.num_tokens)
        for part in scheduled:
            self._cache.check(self._sequences[part.seat.slot].paged, part.seat)

    def _sample(self, scheduled: list[ScheduledSequence], failure: Failure | None) -> StepOutput:
        output = StepOutput(token_ids=[])
        for index, part in enumerate(scheduled):
            seat, speaker = part.seat, self._sequences[part.seat.slot].speaker
            fails = index == 0 and failure is not None and failure.kind is FailureKind.SEQUENCE
            if fails:
                output.failures.append(SequenceFailure(seat.slot, "fails on demand"))
            prompt_logprobs = _prompt_logprobs(part, speaker)
            if prompt_logprobs is not None:
                output.logprobs.append(prompt_logprobs)
            if not part.samples:
                continue
            position = len(seat.token_ids)
            token_id = None if fails else speaker.choose(position)
            if token_id is None and not fails:
                output.failures.append(SequenceFailure(seat.slot, "the sampling parameters leave no token to choose"))
            output.token_ids.append(token_id or 0)
            if token_id is not None and seat.sampling.num_logprobs is not None:
                output.logprobs.append(
                    speaker.logprobs(seat.slot, position, [token_id], seat.sampling.num_logprobs, is_prompt=False)
                )
        if failure is not None and failure.kind is FailureKind.GARBAGE:
            output.token_ids[:] = [VOCAB_SIZE + token_id for token_id in output.token_ids]
        return output

    def _pace(self, begin: float, num_tokens: int, failure: Failure | None) -> None:
        """Wait until the step has taken as long as modelled."""
        duration_s = self._step_s + self._token_s * num_tokens
        if failure is not None:
            duration_s += failure.duration_ms / 1e3
        if duration_s == 0:
            return
        # Sleeping always takes a little longer. Counted from the last step's end on, it does not add up.
        if begin - self._busy_until < _PACE_SLACK_S:
            begin = self._busy_until
        self._busy_until = begin + duration_s
        time.sleep(max(0.0, self._busy_until - time.monotonic()))


def _prompt_logprobs(part: ScheduledSequence, speaker: Speaker) -> SequenceLogprobs | None:
    """Those of the prompt tokens that follow the computed ones; the first token of a prompt follows none."""
    seat, num_top = part.seat, part.seat.sampling.num_prompt_logprobs
    start = seat.num_computed_tokens + 1
    stop = min(start + part.num_tokens, seat.num_prompt_tokens)
    if num_top is None or start >= stop:
        return None
    return speaker.logprobs(seat.slot, start, seat.token_ids[start:stop], num_top, is_prompt=True)


def _info(config: ExecutorConfig, files: Mapping[str, bytes]) -> BackendInfo:
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name} {len(content)} ".encode() + content)
    tokenizer_digest = digest.hexdigest()
    digest.update(f"mock language 1, eos rate {config.mock_eos_rate}".encode())
    model = ModelInfo(
        name="mock",
        fingerprint=digest.hexdigest(),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(END_OF_TEXT_ID, TURN_END_ID),
        tokenizer_digest=tokenizer_digest,
    )
    return BackendInfo(
        name="mock",
        device="none",
        dtype="none",
        model=model,
        block_size=config.block_size,
        num_blocks=config.num_blocks or _NUM_BLOCKS,
        max_model_len=config.max_model_len or _MAX_MODEL_LEN,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
