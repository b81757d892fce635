"""Computes a few short texts while a standby waits, so that its first real step is fast.

The first step of a process touches memory for the first time, starts threads, and compiles kernels
for the shapes of the model.
"""

from protocol.core_worker import CachedRequestData, NewRequestData, SchedulerOutput
from protocol.message import pack_token_ids
from protocol.sampling import SamplingParams
from worker_proc.runner import Runner

NUM_TEXTS = 4
TEXT_LENGTH = 32
_NUM_STEPS = 2
"""A prefill of all texts, and a decode."""


def warm_up(runner: Runner) -> None:
    """Compute the texts and discard them; overwrites the first blocks, if there are enough."""
    facts = runner.facts
    length = min(TEXT_LENGTH, facts.max_model_len - _NUM_STEPS)
    num_blocks = -(-(length + _NUM_STEPS) // facts.block_size)
    num_kv_groups = sum(not group.is_state for group in facts.kv_groups)
    num_state_groups = len(facts.kv_groups) - num_kv_groups
    if length < 1 or facts.num_gpu_blocks <= NUM_TEXTS * num_kv_groups * num_blocks:
        return
    if num_state_groups and facts.num_state_blocks <= NUM_TEXTS:
        return
    blocks = iter(range(1, facts.num_gpu_blocks))
    new = [
        NewRequestData(
            req_id=number,
            token_ids=pack_token_ids([(1 + number + i) % facts.vocab_size for i in range(length)]),
            num_prompt_tokens=length,
            sampling_params=SamplingParams(temperature=float(number % 2), seed=number),
            block_ids=[
                *([next(blocks) for _ in range(num_blocks)] for _ in range(num_kv_groups)),
                *[[1 + number] * num_blocks] * num_state_groups,
            ],
            num_computed_tokens=0,
            num_cached_tokens=0,
        )
        for number in range(NUM_TEXTS)
    ]
    lengths = {text.req_id: length for text in new} if length > 1 else {}
    runner.reset()
    none = CachedRequestData()
    runner.execute(SchedulerOutput(0, new, none, lengths, NUM_TEXTS * length, [], []))
    runner.execute(SchedulerOutput(1, [], none, {}, NUM_TEXTS, [], []))
    runner.reset()
