"""What the scheduler reports of a request: the tokens of a step, its end, or its failure."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from core_proc.request import Request
from core_proc.scheduling.repetition import ends_in_repetition
from protocol.api_core import ErrorCode
from protocol.sampling import FinishReason


class StepResult(msgspec.Struct, gc=False):
    """The tokens that one step brought to a request, and its end."""

    request: Request
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it, other than the first EOS token; None for all other reasons."""

    def check_stop(self, token_id: int, eos_token_ids: Sequence[int]) -> FinishReason | None:
        """Set and return the reason if this last token ends it; stop tokens precede the length."""
        request, params = self.request, self.request.sampling_params
        is_eos = token_id in eos_token_ids
        # Before min_tokens, EOS is sampled only if a grammar allows nothing else.
        is_complete = is_eos and params.grammar is not None
        may_stop = is_complete or request.num_output_tokens >= params.min_tokens
        if may_stop and token_id in request.stop_token_ids:
            self.finish_reason = FinishReason.STOP
            is_named = token_id != eos_token_ids[0] if is_eos else True
            if is_named or (params.ignore_eos and params.grammar is None):
                self.stop_token_id = token_id
        elif request.num_tokens >= request.max_num_tokens:
            self.finish_reason = FinishReason.LENGTH
        elif request.num_tokens >= request.checked_from and self._is_repetition():
            self.finish_reason = FinishReason.REPETITION
        return self.finish_reason

    def _is_repetition(self) -> bool:
        request, params = self.request, self.request.sampling_params
        assert params.repetition_detection is not None
        num_outputs = request.num_output_tokens
        return ends_in_repetition(request.token_ids, num_outputs, params.repetition_detection)


class Failure(NamedTuple):
    """A request that ended because of a failure that affects only this request."""

    request: Request
    error: str
    code: ErrorCode = ErrorCode.INTERNAL
    param: str | None = None
