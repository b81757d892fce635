"""How requests fail, as exceptions: one base class, and a subclass for each remedy."""

from protocol.api_core import ErrorCode, RequestError

RETRY_AFTER_S = 1.0
"""Default wait before a refused request is sent again."""


class RequestFailed(Exception):
    """A request was refused or has failed; `error` has the code, the text and the field."""

    is_refusal = False
    """True if the core refused the request before accepting or computing anything."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.error = error


class InvalidRequest(RequestFailed):
    """A value is out of bounds, or the model cannot serve the request: it would fail again."""


class Overloaded(RequestFailed):
    """The request is valid but not accepted now; send it again after `retry_after_s`."""

    def __init__(self, error: RequestError, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(error)
        self.retry_after_s = retry_after_s


class RequestQuarantined(RequestFailed):
    """Workers died of the request, or while loading its adapter; it is refused for some time."""


class RequestCancelled(RequestFailed):
    """The request was cancelled by its program or aborted by an operator, or its client closed."""


class EngineFailed(RequestFailed):
    """No engine has served for longer than the client waits, or the engine had an error."""


_KINDS: dict[ErrorCode, type[RequestFailed]] = {
    ErrorCode.OVERLOADED: Overloaded,
    ErrorCode.STARTING: Overloaded,
    ErrorCode.DRAINING: Overloaded,
    ErrorCode.QUARANTINED: RequestQuarantined,
    ErrorCode.ABORTED: RequestCancelled,
    ErrorCode.INTERNAL: EngineFailed,
    ErrorCode.COMPUTATION_FAILED: EngineFailed,
    ErrorCode.ENGINE_FAILED: EngineFailed,
}


def failure_of(error: RequestError) -> RequestFailed:
    """Make the exception for an error; InvalidRequest if its code has no class."""
    return _KINDS.get(error.code, InvalidRequest)(error)


def refusal_of(error: RequestError) -> RequestFailed:
    """Make the exception for a request that the core refuses when it arrives."""
    failure = failure_of(error)
    failure.is_refusal = True
    return failure
