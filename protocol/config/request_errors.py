"""Why a request could not be decoded, with names of fields in place of positions on the wire."""

import re

from protocol.api_core import AddRequest, ErrorCode, RequestError
from protocol.config.field_errors import read_field_error
from protocol.message import MAX_TEXT
from protocol.sampling import SamplingParams

_PATH = re.compile(r" - at .*?\$\[(\d+)\](?:\[(\d+)\])?.*")
"""Where a decoding error lies: the index of a field, and of a field within that."""


def request_error(problem: str) -> RequestError:
    """Return the error of a request, given what msgspec wrote about its `AddRequest`."""
    match = _PATH.search(problem)
    if match is None:
        return RequestError(ErrorCode.INVALID, problem[:MAX_TEXT])
    name = AddRequest.__struct_fields__[int(match[1]) - 1]  # the message's own name comes first
    if name == "sampling_params" and match[2] is not None:
        name = SamplingParams.__struct_fields__[int(match[2])]
    param = "prompt" if name in ("prompt_token_ids", "packed_prompt") else name
    text = f"{param}: {read_field_error(_PATH.sub('', problem)).reason}"
    return RequestError(ErrorCode.INVALID, text[:MAX_TEXT], param)
