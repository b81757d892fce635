"""The model of the simulation and its expected streams.

A token is a pure function of the tokens before it, the length of the prompt, the seed, the adapter
and the checkpoint; with a grammar it is one of the allowed ones. A token that is lost or repeated,
an output taken for prompt, a grammar that has lost its place, or a draw that depends on anything
else therefore changes the following tokens.
"""

from array import array
from binascii import crc32
from collections.abc import Sequence

from protocol.model_facts import ModelFacts
from protocol.sampling import FinishReason, SamplingParams
from tests.simulation.grammars import FIRST_TOKEN_ID, SimulatedMatcher
from worker_proc.null.model import null_vector
from worker_proc.null.runner import NullRunner
from worker_proc.request import MirroredRequest

CONTEXT_TOKENS = 4


def next_token_id(
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    seed: int,
    vocab_size: int,
    allowed: Sequence[int] | None = None,
    *,
    adapter_id: int = 0,
    checkpoint: str = "",
) -> int:
    """Return the token that follows `token_ids`: one of `allowed`, if that is given."""
    tail = array("I", token_ids[-CONTEXT_TOKENS:]).tobytes()
    seed += adapter_id + int(checkpoint or 0)
    digest = crc32(tail, len(token_ids) * 1_000_003 + num_prompt_tokens * 8191 + seed & 0xFFFFFFFF)
    if allowed:
        return allowed[digest % len(allowed)]
    return FIRST_TOKEN_ID + digest % (vocab_size - FIRST_TOKEN_ID)


def expected_stream(
    prompt: list[int], params: SamplingParams, facts: ModelFacts, adapter_id: int = 0
) -> tuple[list[int], FinishReason]:
    """Return all tokens of a request, and the reason of its end; a vector comes without tokens."""
    if params.pooling is not None:
        return [], FinishReason.STOP
    token_ids = list(prompt)
    longest = min(len(prompt) + params.max_tokens, facts.max_model_len)
    matcher = None if params.grammar is None else SimulatedMatcher(params.grammar, facts)
    while True:
        allowed = None if matcher is None else matcher.allowed()
        token_id = next_token_id(
            token_ids,
            len(prompt),
            params.seed,
            facts.vocab_size,
            allowed,
            adapter_id=adapter_id,
            checkpoint=facts.checkpoint,
        )
        token_ids.append(token_id)
        num_outputs = len(token_ids) - len(prompt)
        is_complete = matcher is not None and token_id in facts.eos_token_ids
        if is_complete or (num_outputs >= params.min_tokens and token_id in params.stop_token_ids):
            return token_ids[len(prompt) :], FinishReason.STOP
        if len(token_ids) >= longest:
            return token_ids[len(prompt) :], FinishReason.LENGTH
        if matcher is not None:
            matcher.try_consume_tokens([token_id])


def expected_vector(prompt: list[int], params: SamplingParams, facts: ModelFacts) -> bytes:
    """Return the vector of a request with pooling."""
    request = MirroredRequest(0, prompt, len(prompt), params, [], 0, 0)
    return null_vector(request, facts.embedding_size)


class SimulatedModel(NullRunner):
    """The null runner, with all its checks, and with the tokens of `next_token_id`."""

    def _next_token_id(self, request: MirroredRequest, mask: bytes | None = None) -> int:
        allowed = None
        if mask is not None:
            allowed = [i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1]
        return next_token_id(
            request.token_ids,
            request.num_prompt_tokens,
            request.sampling_params.seed,
            self.facts.vocab_size,
            allowed,
            adapter_id=request.adapter_id,
            checkpoint=self.facts.checkpoint,
        )

    def _guess(self, request: MirroredRequest) -> list[int]:
        """Return drafts of which most are right."""
        known = request.num_tokens
        for _ in range(request.draft_limit):
            token_id = self._next_token_id(request)
            is_wrong = (token_id + request.num_tokens) % 4 == 0
            request.token_ids.append(token_id - 1 if is_wrong else token_id)
        drafts = request.token_ids[known:]
        del request.token_ids[known:]
        return drafts
