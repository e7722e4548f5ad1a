"""`everystop.plan` to protobuf and back."""

from __future__ import annotations

from everystop import plan
from everystop.executor.v1 import executor_pb2 as pb


def encode_plan(step_plan: plan.StepPlan) -> pb.StepPlan:
    """To the wire. Empty lists cost nothing there."""
    return pb.StepPlan(
        step_id=step_plan.step_id,
        epoch=step_plan.epoch,
        exit_slots=step_plan.exit_slots,
        admissions=[_encode_sequence(sequence) for sequence in step_plan.admissions],
        block_slots=step_plan.block_slots,
        block_ids=step_plan.block_ids,
        chunk_slots=step_plan.chunk_slots,
        chunk_num_tokens=step_plan.chunk_num_tokens,
        idle_slots=step_plan.idle_slots,
        num_seqs=step_plan.num_seqs,
        num_tokens=step_plan.num_tokens,
    )


def decode_plan(message: pb.StepPlan) -> plan.StepPlan:
    """From the wire."""
    return plan.StepPlan(
        step_id=message.step_id,
        epoch=message.epoch,
        exit_slots=list(message.exit_slots),
        admissions=[_decode_sequence(sequence) for sequence in message.admissions],
        block_slots=list(message.block_slots),
        block_ids=list(message.block_ids),
        chunk_slots=list(message.chunk_slots),
        chunk_num_tokens=list(message.chunk_num_tokens),
        idle_slots=list(message.idle_slots),
        num_seqs=message.num_seqs,
        num_tokens=message.num_tokens,
    )


def encode_result(result: plan.StepResult) -> pb.StepResult:
    """To the wire."""
    return pb.StepResult(
        step_id=result.step_id,
        token_ids=result.token_ids,
        logprobs=[
            pb.SequenceLogprobs(
                slot=entry.slot,
                is_prompt=entry.is_prompt,
                token_ids=entry.token_ids,
                logprobs=entry.logprobs,
                num_top=entry.num_top,
                top_token_ids=entry.top_token_ids,
                top_logprobs=entry.top_logprobs,
            )
            for entry in result.logprobs
        ],
        failures=[pb.SequenceFailure(slot=failure.slot, reason=failure.reason) for failure in result.failures],
        timings=pb.StepTimings(
            waited_us=result.timings.waited_us,
            forward_us=result.timings.forward_us,
            sample_us=result.timings.sample_us,
        ),
    )


def decode_result(message: pb.StepResult) -> plan.StepResult:
    """From the wire."""
    return plan.StepResult(
        step_id=message.step_id,
        token_ids=list(message.token_ids),
        logprobs=[
            plan.SequenceLogprobs(
                slot=entry.slot,
                is_prompt=entry.is_prompt,
                token_ids=list(entry.token_ids),
                logprobs=list(entry.logprobs),
                num_top=entry.num_top,
                top_token_ids=list(entry.top_token_ids),
                top_logprobs=list(entry.top_logprobs),
            )
            for entry in message.logprobs
        ],
        failures=[plan.SequenceFailure(slot=failure.slot, reason=failure.reason) for failure in message.failures],
        timings=plan.StepTimings(
            waited_us=message.timings.waited_us,
            forward_us=message.timings.forward_us,
            sample_us=message.timings.sample_us,
        ),
    )


def encode_hello(hello: plan.Hello) -> pb.Hello:
    """To the wire."""
    return pb.Hello(
        protocol_version=hello.protocol_version,
        max_num_seqs=hello.max_num_seqs,
        max_num_batched_tokens=hello.max_num_batched_tokens,
    )


def decode_hello(message: pb.Hello) -> plan.Hello:
    """From the wire."""
    return plan.Hello(
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        protocol_version=message.protocol_version,
    )


def encode_executor(executor: plan.ExecutorInfo) -> pb.ExecutorInfo:
    """To the wire."""
    return pb.ExecutorInfo(
        protocol_version=plan.PROTOCOL_VERSION,
        epoch=executor.epoch,
        model=pb.ModelInfo(
            name=executor.model.name,
            fingerprint=executor.model.fingerprint,
            vocab_size=executor.model.vocab_size,
            eos_token_ids=executor.model.eos_token_ids,
            tokenizer_digest=executor.model.tokenizer_digest,
        ),
        block_size=executor.block_size,
        num_blocks=executor.num_blocks,
        max_model_len=executor.max_model_len,
        max_num_seqs=executor.max_num_seqs,
        max_num_batched_tokens=executor.max_num_batched_tokens,
        backend=executor.backend,
        device=executor.device,
        dtype=executor.dtype,
    )


def decode_executor(message: pb.ExecutorInfo) -> plan.ExecutorInfo:
    """From the wire."""
    return plan.ExecutorInfo(
        epoch=message.epoch,
        model=plan.ModelInfo(
            name=message.model.name,
            fingerprint=message.model.fingerprint,
            vocab_size=message.model.vocab_size,
            eos_token_ids=tuple(message.model.eos_token_ids),
            tokenizer_digest=message.model.tokenizer_digest,
        ),
        block_size=message.block_size,
        num_blocks=message.num_blocks,
        max_model_len=message.max_model_len,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
        backend=message.backend,
        device=message.device,
        dtype=message.dtype,
    )


def _encode_sequence(sequence: plan.NewSequence) -> pb.NewSequence:
    sampling = sequence.sampling
    return pb.NewSequence(
        slot=sequence.slot,
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=sequence.block_ids,
        sampling=pb.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logit_bias=dict(sampling.logit_bias),
            allowed_token_ids=sampling.allowed_token_ids,
            banned_token_ids=sampling.banned_token_ids,
            min_tokens=sampling.min_tokens,
            end_token_ids=sampling.end_token_ids,
            num_logprobs=sampling.num_logprobs,
            num_prompt_logprobs=sampling.num_prompt_logprobs,
        ),
        traceparent=sequence.traceparent,
    )


def _decode_sequence(message: pb.NewSequence) -> plan.NewSequence:
    sampling = message.sampling
    return plan.NewSequence(
        slot=message.slot,
        request_id=message.request_id,
        attempt=message.attempt,
        token_ids=list(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=list(message.block_ids),
        sampling=plan.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            logit_bias=tuple(sorted(sampling.logit_bias.items())),
            allowed_token_ids=tuple(sampling.allowed_token_ids),
            banned_token_ids=tuple(sampling.banned_token_ids),
            min_tokens=sampling.min_tokens,
            end_token_ids=tuple(sampling.end_token_ids),
            num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
            num_prompt_logprobs=sampling.num_prompt_logprobs if sampling.HasField("num_prompt_logprobs") else None,
        ),
        traceparent=message.traceparent,
    )
