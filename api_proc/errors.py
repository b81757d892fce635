"""Every way a request can fail, in OpenAI's shape `{"error": {message, type, param, code}}`."""

import re

import msgspec

from protocol.api_core import ErrorCode, RequestError
from protocol.client.errors import RequestFailed
from protocol.sampling import FinishReason

RETRY_AFTER_S = 1
UNSUPPORTED = "unsupported_parameter"

_FAULTS = frozenset(
    {
        ErrorCode.INTERNAL,
        ErrorCode.COMPUTATION_FAILED,
        ErrorCode.QUARANTINED,
        ErrorCode.ENGINE_FAILED,
    }
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


def _retry_after(seconds: int = RETRY_AFTER_S) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"retry-after", str(seconds).encode()),)


def counted_as(failure: RequestFailed) -> FinishReason | None:
    """Return what the metrics count a failed request as; None: it was refused, and is not counted.

    A refusal of the core, such as that of a grammar, comes after the request was submitted here.
    """
    if failure.error.code in _FAULTS:
        return FinishReason.ERROR
    return None if failure.is_refusal else FinishReason.ABORT
