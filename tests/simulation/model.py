"""The model of the simulation and its expected streams.

A token is a pure function of the tokens before it, the length of the prompt, and the seed. A token
that is lost or repeated, an output taken for prompt, or a draw that depends on anything else
therefore changes the following tokens.
"""

from array import array
from binascii import crc32
from collections.abc import Sequence

from protocol.core_worker import ModelFacts
from protocol.sampling import FinishReason, SamplingParams
from worker_proc.mirror import MirroredRequest
from worker_proc.null_runner import NullRunner

CONTEXT_TOKENS = 4
FIRST_TOKEN_ID = 3
"""Lower ids, EOS among them, are never sampled."""


def next_token_id(
    token_ids: Sequence[int], num_prompt_tokens: int, seed: int, vocab_size: int
) -> int:
    """Return the token that follows `token_ids`."""
    tail = array("I", token_ids[-CONTEXT_TOKENS:]).tobytes()
    digest = crc32(tail, len(token_ids) * 1_000_003 + num_prompt_tokens * 8191 + seed & 0xFFFFFFFF)
    return FIRST_TOKEN_ID + digest % (vocab_size - FIRST_TOKEN_ID)


def expected_stream(
    prompt: list[int], params: SamplingParams, facts: ModelFacts
) -> tuple[list[int], FinishReason]:
    """Return all tokens of a request, and the reason of its end."""
    token_ids = list(prompt)
    longest = min(len(prompt) + params.max_tokens, facts.max_model_len)
    while True:
        token_id = next_token_id(token_ids, len(prompt), params.seed, facts.vocab_size)
        token_ids.append(token_id)
        num_outputs = len(token_ids) - len(prompt)
        if num_outputs >= params.min_tokens and token_id in params.stop_token_ids:
            return token_ids[len(prompt) :], FinishReason.STOP
        if len(token_ids) >= longest:
            return token_ids[len(prompt) :], FinishReason.LENGTH


class SimulatedModel(NullRunner):
    """The null runner, with all its checks, and with the tokens of `next_token_id`."""

    def _next_token_id(self, request: MirroredRequest, mask: bytes | None = None) -> int:
        return next_token_id(
            request.token_ids,
            request.num_prompt_tokens,
            request.sampling_params.seed,
            self.facts.vocab_size,
        )
