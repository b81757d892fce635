"""How requests fail, as exceptions: one base class, and one class for each thing to do about it."""

from protocol.api_core import ErrorCode, RequestError

RETRY_AFTER_S = 1.0
"""What a client that was refused should wait where nobody knows better."""


class RequestFailed(Exception):
    """One request was refused or cannot go on; `error` has the code, the text and the field."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.error = error


class InvalidRequest(RequestFailed):
    """A value is out of its bounds, or the model cannot serve it: it would fail again."""


class Overloaded(RequestFailed):
    """Nothing is wrong with it, but it is not taken now: send it again after `retry_after_s`."""

    def __init__(self, error: RequestError, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(error)
        self.retry_after_s = retry_after_s


class RequestQuarantined(RequestFailed):
    """It has killed workers whenever it ran; it is refused until the engine has forgotten it."""


class EngineFailed(RequestFailed):
    """No engine has served for so long that waiting was given up, or an error of the engine."""


_KINDS: dict[ErrorCode, type[RequestFailed]] = {
    ErrorCode.OVERLOADED: Overloaded,
    ErrorCode.DRAINING: Overloaded,
    ErrorCode.QUARANTINED: RequestQuarantined,
    ErrorCode.INTERNAL: EngineFailed,
    ErrorCode.COMPUTATION_FAILED: EngineFailed,
    ErrorCode.ENGINE_FAILED: EngineFailed,
}


def failure_of(error: RequestError) -> RequestFailed:
    """Make the exception for an error; whatever else is wrong lies in the request."""
    return _KINDS.get(error.code, InvalidRequest)(error)
