"""Checks the output of a worker against the step that it answers, before any of it is used."""

from collections.abc import Sequence
from math import isnan

from core_proc.request import Request, RequestStatus
from protocol.core_worker import ModelRunnerOutput


class InvalidWorkerOutput(Exception):
    """A worker's message contradicts the step that it answers; none of it was used."""


def check_output(
    output: ModelRunnerOutput,
    due: tuple[int, Sequence[Request]] | None,
    vocab_size: int,
    max_drafts: int,
) -> None:
    """Raise InvalidWorkerOutput unless this answers `due`, the oldest step in flight."""
    if due is None or due[0] != output.step_id:
        text = f"step {due[0]} is" if due is not None else "none is"
        raise InvalidWorkerOutput(f"output of step {output.step_id} came, and {text} due")
    _check_counts(output, due[1], max_drafts)
    greatest = max(output.sampled_token_ids, default=0)
    if greatest >= vocab_size:
        raise InvalidWorkerOutput(f"token id {greatest} is outside the vocabulary of {vocab_size}")
    if output.logprobs:
        _check_logprobs(output, due[1])
    if output.pooled:
        _check_pooled(output, due[1])
    if output.request_errors:
        unknown = output.request_errors.keys() - {request.req_id for request in due[1]}
        if unknown:
            raise InvalidWorkerOutput(f"request_errors names {min(unknown)}, which did not sample")


def _check_counts(output: ModelRunnerOutput, sampling: Sequence[Request], max_drafts: int) -> None:
    counts, drafts = output.num_sampled_tokens, output.num_draft_tokens
    num_tokens = len(output.sampled_token_ids)
    if num_tokens != (sum(counts) if counts else len(sampling)):
        raise InvalidWorkerOutput(f"{num_tokens} tokens for {len(sampling)} that sampled")
    for name, column in (("num_sampled_tokens", counts), ("num_draft_tokens", drafts)):
        if column and len(column) != len(sampling):
            raise InvalidWorkerOutput(f"{name} has {len(column)} numbers for {len(sampling)}")
    if max(drafts, default=0) > max_drafts:
        raise InvalidWorkerOutput(
            f"{max(drafts)} draft tokens for a request, more than {max_drafts}"
        )
    for request, count in zip(sampling, counts, strict=bool(counts)):
        is_known = request.status is RequestStatus.RUNNING
        if count > 1 + (request.num_drafts_in_flight if is_known else max_drafts):
            raise InvalidWorkerOutput(f"{count} tokens at once for request {request.req_id}")


def _check_logprobs(output: ModelRunnerOutput, sampling: Sequence[Request]) -> None:
    counts = output.num_sampled_tokens or [1] * len(sampling)
    expected = {request.req_id: count for request, count in zip(sampling, counts, strict=True)}
    for req_id, rows in output.logprobs.items():
        num_tokens = expected.get(req_id, 0)
        if len(rows) != num_tokens:
            text = f"{len(rows)} logprobs for {num_tokens} tokens of request {req_id}"
            raise InvalidWorkerOutput(text)
        if any(isnan(row.logprob) for row in rows):
            raise InvalidWorkerOutput(f"a logprob of request {req_id} is not a number")


def _check_pooled(output: ModelRunnerOutput, sampling: Sequence[Request]) -> None:
    poolings = {request.req_id: request.sampling_params.pooling for request in sampling}
    for req_id, packed in output.pooled.items():
        pooling = poolings.get(req_id)
        if pooling is None:
            raise InvalidWorkerOutput(f"a vector came for request {req_id}, which asked for none")
        size, rest = divmod(len(packed), 4)
        if rest or size != (pooling.dimensions or max(size, 1)):
            raise InvalidWorkerOutput(f"the vector of request {req_id} has {len(packed)} bytes")
