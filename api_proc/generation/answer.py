"""The interface between the path of a request and the renderers of the routes' responses."""

from collections.abc import Callable
from typing import Any, Protocol

from api_proc.errors import ApiError
from api_proc.generation.generation import Generation
from api_proc.http.connection import Connection
from api_proc.state import ApiState
from api_proc.text.output_sequence import Delta, OutputSequence


class Answer(Protocol):
    """Renders the response of one route, either with `collect` and `body` or as a stream."""

    def collect(self, sequence: OutputSequence, delta: Delta) -> None:
        """Add a delta to a response that is not streamed."""

    def body(self) -> list[bytes]:
        """Return the complete body in pieces; may be called once, and in a thread."""

    def frames(self, sequence: OutputSequence, delta: Delta) -> list[bytes]:
        """Return the events for a delta, in pieces; only the last one contains its tokens.

        May be called in a thread.
        """

    def skip(self, sequence: OutputSequence, delta: Delta) -> None:
        """Skip a delta whose events the client has already received."""

    def last_frames(self) -> list[bytes]:
        """Return the events after all deltas, in pieces."""

    def failure(self, error: ApiError) -> list[bytes]:
        """Return the events that end a stream with an error, in pieces."""

    async def keep(self) -> None:
        """Store the response for later requests; called before its last bytes are sent."""


MakeAnswer = Callable[[ApiState, Connection, Any, Generation], Answer]
"""Returns the renderer of a request's response, given its body."""
