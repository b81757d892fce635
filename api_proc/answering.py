"""From the steps of a generation to one HTTP answer, streamed or whole."""

import logging
from typing import Protocol

from api_proc.connection import Connection
from api_proc.errors import ApiError, from_request_error, internal
from api_proc.event_ids import EventIds
from api_proc.generation import Generation
from api_proc.responses import DONE_FRAME, PromptTokensDetails, Usage
from api_proc.sequence import Delta, OutputSequence
from protocol.errors import RequestFailed
from protocol.failpoints import failpoint

_SEND_BYTES = 16 * 1024
"""Of events, after which they are sent before more are rendered."""

log = logging.getLogger("troika.api")


class Reply(Protocol):
    """The shape of one API's answers."""

    prompt_param: str
    """Name of the field that the prompt came in."""

    def resume(self, begun: set[int]) -> None:
        """These sequences have begun in an earlier answer."""

    def frames(self, sequence: OutputSequence, delta: Delta) -> list[bytes]:
        """Server-sent events for what is new; all but the last stand for what was told before."""

    def usage_frame(self) -> bytes:
        """The event after the last choice, where it was asked for."""

    def collect(self, sequence: OutputSequence, delta: Delta) -> None:
        """Keep what is new for the whole answer."""

    def body(self) -> bytes:
        """The whole answer."""


def usage_of(generation: Generation, num_prompts: int) -> Usage:
    """Count the tokens so far."""
    sequences = generation.sequences
    firsts = sequences[:: len(sequences) // num_prompts]
    num_prompt_tokens = sum(sequence.num_prompt_tokens for sequence in firsts)
    num_output_tokens = sum(sequence.num_output_tokens for sequence in sequences)
    return Usage(
        num_prompt_tokens,
        num_output_tokens,
        num_prompt_tokens + num_output_tokens,
        PromptTokensDetails(sum(sequence.num_cached_tokens for sequence in firsts)),
    )


async def answer(
    connection: Connection, generation: Generation, reply: Reply, *, is_streamed: bool
) -> None:
    """Send the answer of a generation.

    Raises:
        ApiError: the engine has given up before anything was sent.
    """
    failpoint("api.after_accept")
    if is_streamed:
        await _answer_streamed(connection, generation, reply)
    else:
        await _answer_whole(connection, generation, reply)


async def _answer_whole(connection: Connection, generation: Generation, reply: Reply) -> None:
    """Wait for all sequences and send one JSON body."""
    try:
        async for step in generation.steps():
            for sequence, delta in step:
                reply.collect(sequence, delta)
    except RequestFailed as failure:
        raise from_request_error(failure.error, reply.prompt_param) from failure
    if not generation.cancelled:
        await connection.send_json(200, reply.body())


async def _answer_streamed(connection: Connection, generation: Generation, reply: Reply) -> None:
    """Send what comes as server-sent events; all that one step brought goes in one piece."""
    connection.keep_alive()
    generation.told = generation.told or [None] * len(generation.sequences)
    told = generation.told
    ids = EventIds(connection.request_id, list(told))
    reply.resume({index for index, count in enumerate(told) if count is not None})
    try:
        async for step in generation.steps():
            await _send_step(connection, reply, ids, step)
        if not generation.cancelled:
            usage = b"" if generation.is_usage_told else ids.tag_usage(reply.usage_frame())
            await connection.send_frames(usage + DONE_FRAME, more=False)
    except RequestFailed as failure:
        await _fail(connection, from_request_error(failure.error, reply.prompt_param))
    except Exception:
        log.exception("request %s failed", connection.request_id)
        await _fail(connection, internal())


async def _send_step(
    connection: Connection, reply: Reply, ids: EventIds, step: list[tuple[OutputSequence, Delta]]
) -> None:
    """Render and send, no more at a time than a connection may hold."""
    pieces: list[bytes] = []
    num_bytes = 0
    for sequence, delta in step:
        events = reply.frames(sequence, delta)
        events = ids.tag(events, sequence.index, len(delta.token_ids))
        pieces += events
        num_bytes += sum(map(len, events))
        if num_bytes >= _SEND_BYTES:
            failpoint("api.before_flush")
            await connection.send_frames(b"".join(pieces))
            pieces, num_bytes = [], 0
    if pieces:
        failpoint("api.before_flush")
        await connection.send_frames(b"".join(pieces))


async def _fail(connection: Connection, error: ApiError) -> None:
    """The status line cannot be taken back, so an error in the middle becomes an event."""
    if not connection.response_started:
        raise error
    await connection.send_frames(b"data: %b\n\n%b" % (error.body(), DONE_FRAME), more=False)
