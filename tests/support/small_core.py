"""A scheduler core small enough to count its blocks by hand."""

from scheduler_svc.core import CoreConfig, Scheduler


def make_core(
    *, num_blocks: int = 32, max_num_seqs: int = 3, policy: str = "fcfs", batching: str = "continuous"
) -> Scheduler:
    """Blocks of 4 tokens, steps of at most 6."""
    config = CoreConfig(
        block_size=4,
        num_blocks=num_blocks,
        vocab_size=100,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=6,
        max_model_len=64,
        max_prefill_chunk=6,
        watermark=0.0,
    )
    return Scheduler(config, epoch=7, policy=policy, batching=batching)
