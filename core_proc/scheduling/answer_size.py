"""The size of the worker's answer to a step, which must fit into a frame.

Each running request may bring one row of log-probabilities to an answer, of a prompt token or of a
sampled one. Requests are admitted while these rows fit into `MAX_ROW_BYTES`. The scheduler divides
the rest of `MAX_ANSWER_BYTES` among drafts, vectors and further prompt tokens.
"""

from protocol.sampling import MAX_EMBEDDING_SIZE, MAX_LOGPROBS, SamplingParams

MAX_ANSWER_BYTES = 12 * 2**20
"""Log-probabilities and vectors in one answer; the rest of the frame is for ids and errors."""
MAX_ROW_BYTES = 6 * 2**20
"""Rows of running requests, one each: 16,384 requests with 20 alternatives."""
VECTOR_BYTES = 4 * MAX_EMBEDDING_SIZE + 16


def _row_bytes(num_candidates: int) -> int:
    """Return the maximum size of a row that describes a token and these candidates."""
    return 32 + 14 * num_candidates


SCORED_TOKEN_BYTES = _row_bytes(MAX_LOGPROBS)
"""Maximum size of the row of one prompt token."""


def row_bytes(params: SamplingParams) -> int:
    """Return the maximum size of the row that a request brings to each answer; 0: none."""
    size = 0 if params.prompt_logprobs is None else SCORED_TOKEN_BYTES
    return max(size, sampled_row_bytes(params))


def sampled_row_bytes(params: SamplingParams) -> int:
    """Return the maximum size of the row of one sampled token of a request; 0: none."""
    if params.logprobs is None:
        return 0
    return _row_bytes(len(params.logprob_token_ids) or params.logprobs)
