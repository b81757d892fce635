"""Requests over drafts with recurrent layers, in settings where states are few or preempted."""

from protocol.sampling import SamplingParams

NUM_DRAFTS = 4
SHARED = list(range(40, 61))
PROMPTS = [[*SHARED[: 3 * number], 5 + number, *range(70, 70 + number)] for number in range(8)]
PARAMS = [
    SamplingParams(
        temperature=0.9 * (number % 2), seed=number, max_tokens=40, ignore_eos=True, logprobs=0
    )
    for number in range(len(PROMPTS))
]
FEW_STATES: dict[str, object] = {
    "mamba_block_size": 8,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "max_steps_in_flight": 2,
}
PREEMPTING: dict[str, object] = {"scheduler_reserve_full_isl": False, "mamba_block_size": 16}
