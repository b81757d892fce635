"""Every way a request can fail, in OpenAI's shape `{"error": {message, type, param, code}}`."""

import re

import msgspec

from protocol.api_core import ErrorCode, RequestError

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RETRY_AFTER_S = 1

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<field>\w+)`")
_WILDCARD = re.compile(r"\[\.\.\.\]")


class ErrorDetail(msgspec.Struct, frozen=True):
    """The object under `error`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The whole body of an error."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that ends with an HTTP error instead of an answer."""

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
        """OpenAI's kind of error."""
        if self.status == 429:
            return "rate_limit_error"
        if self.status == 401:
            return "authentication_error"
        return INVALID_REQUEST if self.status < 500 else SERVER_ERROR

    def body(self) -> bytes:
        """The JSON text."""
        detail = ErrorDetail(self.message, self.type, self.param, self.code)
        return msgspec.json.encode(ErrorBody(detail))


def invalid(param: str, message: str, code: str = ErrorCode.INVALID) -> ApiError:
    """A field that cannot be used: 400."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def unsupported(param: str, message: str = "is not supported") -> ApiError:
    """A field that asks for something this server does not do: 400."""
    return ApiError(400, f"{param} {message}", param=param, code="unsupported_parameter")


def unavailable(message: str, code: str, retry_after_s: int = RETRY_AFTER_S) -> ApiError:
    """No requests now, but later: 503."""
    return ApiError(503, message, code=code, headers=_retry_after(retry_after_s))


def overloaded(message: str) -> ApiError:
    """Too many requests: 429."""
    return ApiError(429, message, code=ErrorCode.OVERLOADED, headers=_retry_after())


def internal() -> ApiError:
    """A fault of ours; the log has the details: 500."""
    return ApiError(500, "internal error", code=ErrorCode.INTERNAL)


def from_request_error(error: RequestError, prompt_param: str) -> ApiError:
    """Translate a refusal by the engine.

    Args:
        prompt_param: name of the field that the prompt came in.
    """
    if error.code is ErrorCode.OVERLOADED:
        return overloaded(error.message)
    if error.code is ErrorCode.DRAINING:
        return unavailable(error.message, ErrorCode.DRAINING)
    if error.code is ErrorCode.ENGINE_FAILED:
        return unavailable(error.message, ErrorCode.ENGINE_FAILED)
    if error.code in (ErrorCode.INTERNAL, ErrorCode.COMPUTATION_FAILED, ErrorCode.QUARANTINED):
        return ApiError(500, error.message, code=error.code)
    param = prompt_param if error.param == "prompt" else error.param
    return ApiError(400, error.message, param=param, code=error.code)


def from_decoding(error: Exception) -> ApiError:
    """Translate a failure of msgspec to read a body."""
    text = str(error)
    if isinstance(error, RecursionError):
        return ApiError(400, "the JSON body is nested too deeply", code="too_deep")
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(400, f"the body is not valid JSON: {text}", code="invalid_json")
    found = _PATH.search(text)
    reason = text[: found.start()] if found else text
    param = _WILDCARD.sub("", found["path"]) if found else ""
    if missing := _MISSING.search(reason):
        param = f"{param}.{missing['field']}" if param else missing["field"]
        reason, code = "the field is missing", "missing_required_parameter"
    else:
        code = _code(param, reason)
    return ApiError(400, f"{param or 'body'}: {reason}", param=param or None, code=code)


def _code(param: str, reason: str) -> str:
    if param == "prompt" and ("length >= 1" in reason or "`null`" in reason):
        return "empty_prompt"
    if param.startswith("prompt["):
        return "empty_prompt" if "length >= 1" in reason else "token_out_of_range"
    return ErrorCode.INVALID


def _retry_after(seconds: int = RETRY_AFTER_S) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"retry-after", str(seconds).encode()),)
