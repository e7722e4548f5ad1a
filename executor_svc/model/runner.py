"""The model on the CPU as a backend: load it, run steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import structlog
import torch
from torch import Tensor

from everystop.plan import ModelInfo, SequenceLogprobs
from everystop.settings import ExecutorConfig
from everystop_kernels.ops import load_ops
from executor_svc.backend import Backend, BackendInfo, ScheduledSequence, StepBatch, StepOutput
from executor_svc.model.batch import build_inputs, select_rows
from executor_svc.model.config import load_config
from executor_svc.model.decoder import Decoder
from executor_svc.model.identity import digest_files, fingerprint, read_tokenizer_files
from executor_svc.model.kv_cache import allocate_cache, plan_cache
from executor_svc.model.sampler import Sampler, prompt_logprobs
from executor_svc.model.source import resolve
from executor_svc.model.threads import num_threads
from executor_svc.model.weights import load_weights

_MAX_PROMPT_LOGPROB_ROWS = 256
"""Logits of prompt tokens are made this many rows at a time: each row is a whole vocabulary."""

_log = structlog.get_logger()


class CpuBackend:
    """See `executor_svc.backend.Backend`."""

    def __init__(
        self, info: BackendInfo, tokenizer_files: Mapping[str, bytes], decoder: Decoder, caches: list[Tensor]
    ) -> None:
        self._info = info
        self._tokenizer_files = tokenizer_files
        self._decoder = decoder
        self._caches = caches
        self._sampler = Sampler(info.model.vocab_size, torch.device("cpu"))

    @property
    def info(self) -> BackendInfo:
        """What it offers."""
        return self._info

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """As they stand in the model's folder."""
        return self._tokenizer_files

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> StepOutput:
        """Compute one step."""
        for seat in batch.exited:
            self._sampler.exit(seat)
        for seat in batch.admitted:
            self._sampler.admit(seat)
        if not batch.scheduled:
            return StepOutput([])
        started = time.perf_counter_ns()
        hidden = self._decoder.forward(build_inputs(batch.scheduled, self._info.block_size), self._caches)
        last_rows = [end - 1 for end in accumulate(entry.num_tokens for entry in batch.scheduled)]
        sampling = [(row, entry.seat) for row, entry in zip(last_rows, batch.scheduled, strict=True) if entry.samples]
        logits = self._logits(hidden, [row for row, _ in sampling])
        forwarded = time.perf_counter_ns()
        sampled = self._sampler.sample(logits, [seat for _, seat in sampling])
        logprobs = [*self._prompt_logprobs(hidden, batch.scheduled), *sampled.logprobs]
        finished = time.perf_counter_ns()
        return StepOutput(
            token_ids=sampled.token_ids,
            logprobs=logprobs,
            failures=sampled.failures,
            forward_us=(forwarded - started) // 1000,
            sample_us=(finished - forwarded) // 1000,
        )

    def reset(self) -> None:
        """Forget every sequence. The cache may keep what it has: every slot is written before it is read."""
        self._sampler.reset()

    def close(self) -> None:
        """Let go of the cache."""
        self._caches = []

    def _logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        if not rows:
            return hidden.new_empty(0, self._info.model.vocab_size)
        return self._decoder.logits(select_rows(hidden, rows))[: len(rows)]

    def _prompt_logprobs(self, hidden: Tensor, scheduled: Sequence[ScheduledSequence]) -> Iterator[SequenceLogprobs]:
        start = 0
        for entry in scheduled:
            seat, first_position = entry.seat, entry.seat.num_computed_tokens
            if seat.sampling.num_prompt_logprobs is not None:
                # A row speaks about the next token; those that speak about the answer are the sampler's.
                end = start + min(entry.num_tokens, seat.num_prompt_tokens - 1 - first_position)
                for first_row in range(start, end, _MAX_PROMPT_LOGPROB_ROWS):
                    rows = range(first_row, min(first_row + _MAX_PROMPT_LOGPROB_ROWS, end))
                    yield prompt_logprobs(self._logits(hidden, rows), seat, first_position + first_row - start)
            start += entry.num_tokens


def load(config: ExecutorConfig) -> Backend:
    """Find, read and set up the model that `config` names. ServiceError says what is wrong with it or the limits."""
    resolved = resolve(config.model)
    # NOTE: on one thread, so that no team of OpenMP threads is left behind here: steps run in another thread with a
    # team of its own, and OpenMP stops spinning, which every product pays for, once there are more threads than cores.
    torch.set_num_threads(1)
    model = load_config(resolved.path)
    dtype = _choose_dtype(config.dtype)
    geometry = plan_cache(model, config, dtype)
    weights = load_weights(resolved.path, model, dtype)
    caches = allocate_cache(model, geometry, dtype)
    decoder = Decoder(
        model, weights, load_ops("torch"), max_model_len=geometry.max_model_len, block_size=geometry.block_size
    )
    tokenizer_files = read_tokenizer_files(resolved.path)
    tokenizer_digest = digest_files(tokenizer_files)
    info = BackendInfo(
        name="cpu",
        device="cpu",
        dtype=str(dtype).removeprefix("torch."),
        model=ModelInfo(
            name=resolved.name,
            fingerprint=fingerprint(resolved.path, tokenizer_digest),
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            tokenizer_digest=tokenizer_digest,
        ),
        block_size=geometry.block_size,
        num_blocks=geometry.num_blocks,
        max_model_len=geometry.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    _log.info(
        "model_loaded",
        model=info.model.name,
        dtype=info.dtype,
        threads=num_threads(config.threads),
        num_blocks=info.num_blocks,
        kv_cache_bytes=geometry.num_bytes,
        max_model_len=info.max_model_len,
    )
    if config.max_model_len is None and info.max_model_len < model.max_position_embeddings:
        _log.warning(
            "max_model_len_reduced",
            max_model_len=info.max_model_len,
            model_max_model_len=model.max_position_embeddings,
            reason="the KV cache holds no more; raise kv_cache_gib",
        )
    torch.set_num_threads(num_threads(config.threads))
    return CpuBackend(info, tokenizer_files, decoder, caches)


def _choose_dtype(name: str) -> torch.dtype:
    if name == "auto":
        # Without instructions for it, bfloat16 is computed by way of float32 and slower than that.
        return torch.bfloat16 if _has_bfloat16_instructions() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _has_bfloat16_instructions() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False
    # On x86 either of the first two, on ARM the last.
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)
