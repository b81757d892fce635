"""Every way a request can fail, in OpenAI's shape `{"error": {message, type, param, code}}`."""

import re
from typing import Any

import msgspec

from api_proc.http.choices import choices
from protocol.api_core import ErrorCode, RequestError
from protocol.client.errors import RequestFailed
from protocol.config.field_errors import read_field_error
from protocol.sampling import FinishReason

RETRY_AFTER_S = 1
UNSUPPORTED = "unsupported_parameter"

_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
"""One step of a path: an index or a name."""
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_MAX_SEARCHED = 2**16
"""Largest body that is decoded again to show a wrong value."""
_LONGEST_SHOWN = 34
"""Longest JSON of a value that is shown, in bytes."""
_FAULTS = frozenset(
    (
        *(ErrorCode.INTERNAL, ErrorCode.COMPUTATION_FAILED),
        *(ErrorCode.QUARANTINED, ErrorCode.ENGINE_FAILED),
    )
)
"""Errors of the engine's own: the metrics count them whether or not a request was accepted."""


class ApiError(Exception):
    """A request ends with an HTTP error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def type(self) -> str:
        """OpenAI's class of the error."""
        if self.status == 429:
            return "rate_limit_error"
        if self.status == 401:
            return "authentication_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        fields = {name: getattr(self, name) for name in ("message", "type", "param", "code")}
        return msgspec.json.encode({"error": fields})


def invalid(param: str, message: str, code: str = ErrorCode.INVALID) -> ApiError:
    """Return a 400 for a field with a bad value."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def unsupported(param: str, message: str = "is not supported") -> ApiError:
    """Return a 400 for a field that asks for a feature that this server lacks."""
    return ApiError(400, f"{param} {message}", param=param, code=UNSUPPORTED)


def unavailable(message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """Return a 503: the same request may succeed later."""
    return ApiError(503, message, code=code, headers=_retry_after(retry_after_s))


def overloaded(message: str) -> ApiError:
    """Return a 429: too much is open."""
    return ApiError(429, message, code=ErrorCode.OVERLOADED, headers=_retry_after())


def internal() -> ApiError:
    """Return a 500 for an error in the server, whose details are in the log only."""
    return ApiError(500, "internal error", code=ErrorCode.INTERNAL)


def from_request_error(error: RequestError, prompt_param: str) -> ApiError:
    """Translate an error of the engine; `prompt_param` is the field that holds the prompt."""
    if error.code is ErrorCode.OVERLOADED:
        return overloaded(error.message)
    if error.code in (ErrorCode.STARTING, ErrorCode.DRAINING, ErrorCode.ENGINE_FAILED):
        return unavailable(error.message, error.code)
    if error.code is ErrorCode.DEADLINE:
        headers = ((b"x-should-retry", b"false"),)
        return ApiError(504, error.message, param="timeout", code=error.code, headers=headers)
    if error.code in (ErrorCode.INTERNAL, ErrorCode.COMPUTATION_FAILED, ErrorCode.QUARANTINED):
        return ApiError(500, error.message, code=error.code)
    if error.code is ErrorCode.ABORTED:
        return ApiError(409, error.message, code=error.code)
    param = prompt_param if error.param == "prompt" else error.param
    message = error.message
    if param and not re.match(rf"{re.escape(param)}(?![\w-])", message):
        message = f"{param}: {message}"
    return ApiError(400, message, param=param, code=error.code)


def from_decoding(error: Exception, kind: Any = None, raw: bytes | None = None) -> ApiError:
    """Translate an error of msgspec's decoder for a type; `param` is the path of the field.

    The message shows the wrong value, if that is short and `raw` is the body.
    """
    text = str(error)
    if isinstance(error, RecursionError):
        return ApiError(400, "the JSON body is nested too deeply", code="too_deep")
    if not isinstance(error, msgspec.ValidationError):
        reason = f"the body is not valid JSON: {_not_json(text, raw)}"
        return ApiError(400, reason if raw != b"" else "the body is empty", code="invalid_json")
    problem = read_field_error(text)
    param = problem.place
    if problem.is_missing:
        if param == "prompt" and raw is not None and _has_name(raw, "prompt_embeds"):
            return unsupported("prompt_embeds")
        code, reason = "missing_required_parameter", problem.reason
    else:
        code = _code(param, problem.original)
        reason = choices(problem.original, kind, param) or (
            read_field_error(text, _shown(raw, param)).reason
        )
    return ApiError(400, f"{param or 'body'}: {reason}", param=param or None, code=code)


def _not_json(text: str, raw: bytes | None) -> str:
    """Return why a body is not JSON; the decoder's text leads astray for some characters."""
    if raw is None or len(raw) > _MAX_SEARCHED:
        return text
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 (byte {error.start})"
    half = _HALF_PAIR.search(raw) if "truncated" in text else None
    return text if half is None else f"half of a surrogate pair (byte {half.start()})"


def _has_name(raw: bytes, name: str) -> bool:
    """Return whether a body that was decoded has a name whose value is not null."""
    try:
        value = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get(name)
    except (msgspec.DecodeError, UnicodeDecodeError):  # in the name of an unknown field
        return False
    return value is not None and bytes(value).strip() != b"null"


def _code(param: str, problem: str) -> str:
    if param == "prompt" and ("length >= 1" in problem or "`null`" in problem):
        return "empty_prompt"
    if param.startswith(("prompt[", "token_ids[")):
        return "empty_prompt" if "length >= 1" in problem else code_of_id(problem)
    return ErrorCode.INVALID


def code_of_id(problem: str) -> str:
    """Return the code of msgspec's error about a token id: `null` stands for none."""
    return ErrorCode.INVALID if "`null`" in problem else "token_out_of_range"


def _shown(raw: bytes | None, path: str) -> str | None:
    """Return the JSON text of a number or a short string in a body; None: there is none."""
    if not path or raw is None or len(raw) > _MAX_SEARCHED:
        return None
    try:
        value = msgspec.json.decode(raw)
        for index, name in _STEP.findall(path):
            value = value[int(index)] if index else value[name]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return None
    if isinstance(value, list | dict):
        return None
    shown = msgspec.json.encode(value)
    return shown.decode() if len(shown) <= _LONGEST_SHOWN else None


def _retry_after(seconds: int = RETRY_AFTER_S) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"retry-after", str(seconds).encode()),)


def counted_as(failure: RequestFailed) -> FinishReason | None:
    """Return what the metrics count a failed request as; None: it was refused, and is not counted.

    A refusal of the core, such as that of a grammar, comes after the request was submitted here.
    """
    if failure.error.code in _FAULTS:
        return FinishReason.ERROR
    return None if failure.is_refusal else FinishReason.ABORT
