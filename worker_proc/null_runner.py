"""A runner without a model: the next token is a pure function of the context.

It lets real API, core and worker processes run in a test within milliseconds, checks every delta it
is sent, and measures the control plane alone.
"""

import time
from binascii import crc32
from collections.abc import Sequence

from protocol.core_worker import (
    ModelFacts,
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
    TokenLogprobs,
)
from worker_proc.mirror import Mirror, MirroredRequest, MirrorError, ScheduledRequest

CONTEXT_TOKENS = 4
"""The next token depends on so many tokens before it, and on its position."""


def next_token_id(token_ids: Sequence[int], vocab_size: int, eos_token_ids: Sequence[int]) -> int:
    """Return the token that follows `token_ids`: never an EOS id, unless there is nothing else."""
    tail = token_ids[-CONTEXT_TOKENS:]
    digest = crc32(b"".join(token_id.to_bytes(4, "little") for token_id in tail), len(token_ids))
    first = digest % vocab_size
    for offset in range(vocab_size):
        candidate = (first + offset) % vocab_size
        if candidate not in eos_token_ids:
            return candidate
    return first


class NullRunner:
    """Obeys the scheduler like a model would, in microseconds."""

    def __init__(
        self, facts: ModelFacts, step_delay_s: float = 0.0, token_delay_s: float = 0.0
    ) -> None:
        """Take the facts to announce, and how long a step and each of its tokens shall last."""
        self._facts = facts
        self._step_delay_s = step_delay_s
        self._token_delay_s = token_delay_s
        self._mirror = Mirror(
            facts.block_size, facts.num_gpu_blocks, facts.max_model_len, facts.vocab_size
        )
        self._writers: dict[int, MirroredRequest] = {}

    @property
    def facts(self) -> ModelFacts:
        """The facts that it was made with."""
        return self._facts

    def reset(self) -> None:
        """Forget every request."""
        self._mirror.reset()
        self._writers.clear()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Check the step and return its tokens.

        Raises:
            MirrorError: the step contradicts those before it, or two live requests write one block.
        """
        began_ns = time.perf_counter_ns()
        scheduled = self._mirror.apply(step)
        for part in scheduled:
            self._claim_blocks(part)
        self._wait(step.total_num_scheduled_tokens)
        sampling = [part.request for part in scheduled if part.samples]
        sampled = [self._next_token_id(request) for request in sampling]
        logprobs = {
            request.req_id: self._logprobs(token_id, request.sampling_params.logprobs)
            for request, token_id in zip(sampling, sampled, strict=True)
            if request.sampling_params.logprobs is not None
        }
        prompt_logprobs = [
            self._prompt_logprobs(part, num_top)
            for part in scheduled
            if (num_top := part.request.sampling_params.prompt_logprobs) is not None
            and part.start + 1 < part.request.num_prompt_tokens
        ]
        self._mirror.advance(scheduled, sampled)
        forward_ns = time.perf_counter_ns() - began_ns
        return ModelRunnerOutput(step.step_id, sampled, logprobs, prompt_logprobs, forward_ns)

    def _wait(self, num_tokens: int) -> None:
        delay_s = self._step_delay_s + self._token_delay_s * num_tokens
        if delay_s > 0:
            time.sleep(delay_s)

    def _next_token_id(self, request: MirroredRequest) -> int:
        return next_token_id(request.token_ids, self._facts.vocab_size, self._facts.eos_token_ids)

    def _claim_blocks(self, part: ScheduledRequest) -> None:
        request, block_size = part.request, self._facts.block_size
        first = max(part.start, request.num_cached_tokens) // block_size
        for index in range(first, (part.end - 1) // block_size + 1):
            block_id = request.block_ids[index]
            writer = self._writers.get(block_id)
            if writer is request:
                continue
            if writer is not None and self._mirror.requests.get(writer.req_id) is writer:
                raise MirrorError(
                    f"block {block_id} is written by requests {writer.req_id} and {request.req_id}"
                )
            self._writers[block_id] = request

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        others = [i for i in range(min(num_top + 1, self._facts.vocab_size)) if i != token_id]
        top_ids = [token_id, *others][:num_top]
        return TokenLogprobs(
            token_id, 0.0, 1, top_ids, [-float(rank) for rank in range(len(top_ids))]
        )

    def _prompt_logprobs(self, part: ScheduledRequest, num_top: int) -> PromptLogprobs:
        end = min(part.end + 1, part.request.num_prompt_tokens)
        token_ids = part.request.token_ids[part.start + 1 : end]
        entries = [self._logprobs(token_id, num_top) for token_id in token_ids]
        return PromptLogprobs(part.request.req_id, part.start + 1, entries)
