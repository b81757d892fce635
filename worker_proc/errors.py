"""Why a checkpoint cannot be served, raised while loading, and why a step cannot be computed."""

from collections.abc import Iterator
from contextlib import contextmanager

_MAX_CHARACTERS = 200


class UnsupportedModel(ValueError):
    """The model cannot be computed correctly here; the text names the part and the reason."""


class CheckpointError(ValueError):
    """The checkpoint is incomplete or wrong; the text names the file, and the key or tensor."""


class InsufficientMemory(ValueError):
    """The weights do not fit, or the KV cache cannot hold a sequence of the configured length."""


class MirrorError(Exception):
    """A step contradicts the steps before it, or exceeds a bound."""


@contextmanager
def unsupported_failures(model_type: str) -> Iterator[None]:
    """Raise UnsupportedModel for errors of a model's own code, which another try would repeat.

    The code runs on the meta device, without weights, so that nothing but the configuration makes
    it fail.
    """
    try:
        yield
    except (ValueError, OSError, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"the model type {model_type} is not supported: its code cannot be prepared"
            f" ({describe(error)})"
        ) from error


def describe(error: Exception) -> str:
    """Return an error in one line of limited length."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
