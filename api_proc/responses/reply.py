"""The answer to a request for a response: the whole object, or its events."""

import secrets
from typing import Any

import msgspec

from api_proc.chat.events import ContentDelta, ToolCallEnd, ToolCallStart
from api_proc.chat.events import Event as ChatEvent
from api_proc.errors import ApiError
from api_proc.generation.generation import Generation
from api_proc.http.connection import Connection, encode
from api_proc.openai.encoded_list import EncodedLists
from api_proc.openai.logprobs import chat_items
from api_proc.responses.body import ResponsesBody, ResponsesChat
from api_proc.responses.events import (
    CallArgumentsDelta,
    Completed,
    Created,
    Event,
    Failed,
    Incomplete,
    InProgress,
    ReasoningTextDelta,
    TextDelta,
    type_of,
)
from api_proc.responses.items import with_ids
from api_proc.responses.objects import (
    RESPONSE_PREFIX,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ReasoningSettings,
    Response,
    ResponseError,
    ResponseUsage,
)
from api_proc.responses.output import ResponseOutput
from api_proc.responses.positions import START, EventPosition, parse_position
from api_proc.responses.store import StoredResponse
from api_proc.state import ApiState
from api_proc.text.output_sequence import Delta, OutputSequence
from protocol.api_core import ErrorCode
from protocol.sampling import FinishReason

_DELTAS = (TextDelta, ReasoningTextDelta, CallArgumentsDelta)


class ResponseReply:
    """The answer of one generation, which has a single sequence."""

    def __init__(
        self, state: ApiState, connection: Connection, body: ResponsesChat, generation: Generation
    ) -> None:
        self.id = RESPONSE_PREFIX + state.ids.own(_number(generation))
        self._tokenizer = state.text.tokenizer
        self._store = state.stored_responses
        self._body = body
        self._generation = generation
        self._lists = EncodedLists(is_kept=True)
        self._output = ResponseOutput(self.id.removeprefix(RESPONSE_PREFIX), self._lists)
        self._response = _response_of(state, body.request, generation.created, self.id)
        self._final: Response | None = None
        self._stored: StoredResponse | None = None
        position = START
        if generation.position is not None and connection.last_event_id is not None:
            position = parse_position(connection.last_event_id, connection.request_id) or START
        self._has_begun = position.num_tokens > 0
        self._num_tokens = position.num_tokens
        self._offset = 0
        """Of the last event in its step."""
        self._num_known = position.offset
        """Characters of the next events that the client has."""
        self._number = position.sequence_number + 1
        generation.response = self

    # The interface of an answer -----------------------------------------------------------------

    def collect(self, sequence: OutputSequence, delta: Delta) -> None:
        self._push(delta)

    def body(self) -> list[bytes]:
        return self._lists.encoded(self._end())

    def frames(self, sequence: OutputSequence, delta: Delta) -> list[bytes]:
        plain = self._plain_frame(delta)
        if plain is not None:
            return [plain]
        return self._render(self._opening() + self._push(delta), len(delta.token_ids))

    def skip(self, sequence: OutputSequence, delta: Delta) -> None:
        self._push(delta)

    def last_frames(self) -> list[bytes]:
        response = self._end()
        kind = Completed if response.status == "completed" else Incomplete
        return self._render([kind(response=response)], 0)

    def failure(self, error: ApiError) -> list[bytes]:
        if error.code == ErrorCode.ABORTED:
            response = self._close("cancelled")
        else:
            details = ResponseError(error.code, error.message, error.param)
            response = self._close("failed", details)
        opening = self._render(self._opening(), 0)
        self._num_known = 0
        return opening + self._render([Failed(response=response)], 0)

    async def keep(self) -> None:
        if self._stored is not None:
            await self._store.put(self.id, self._stored)

    # The interface of an open response ----------------------------------------------------------

    def snapshot(self) -> bytes:
        output = self._output.items()
        return self._encoded(msgspec.structs.replace(self._response, output=output))

    async def cancel(self) -> bytes:
        response = self._close("cancelled")
        self._generation.abort()
        await self.keep()
        return self._encoded(response)

    def _encoded(self, response: Response) -> bytes:
        return b"".join(self._lists.encoded(response))

    # Rendering ----------------------------------------------------------------------------------

    def _opening(self) -> list[Event]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [Created(response=self._response), InProgress(response=self._response)]

    def _plain_frame(self, delta: Delta) -> bytes | None:
        """Return the frame of a piece of text within an item; this saves most of the time."""
        if delta.finish_reason is not None or delta.logprobs is not None or self._num_known:
            return None
        if delta.events is None:
            event: ChatEvent = ContentDelta(delta.text)
        elif len(delta.events) == 1:
            event = delta.events[0]
        else:
            return None
        if isinstance(event, ToolCallStart | ToolCallEnd) or not event.text:
            return None
        parts = self._output.extend(event)
        if parts is None:
            return None
        self._num_tokens += len(delta.token_ids)
        self._offset = 0
        start, middle, end = parts
        number, text = self._number, encode(event.text)
        self._number += 1
        id_line = self._id_line(EventPosition(self._num_tokens, 0, number))
        return b"%b%d%b%b%b%b\n" % (start, number, middle, text, end, id_line)

    def _push(self, delta: Delta) -> list[Event]:
        chat_events: list[ChatEvent]
        if delta.events is None:
            chat_events = [ContentDelta(delta.text)] if delta.text else []
        else:
            chat_events = delta.events
        is_cut = delta.finish_reason == FinishReason.LENGTH
        logprobs = self._logprobs(delta)
        events: list[Event] = []
        # Which tokens belong to the message does not depend on how many arrived together.
        *parts, chat_events = delta.token_events or [chat_events]
        for place, part in enumerate(parts):
            events += self._output.push(part, logprobs[place : place + 1])
        events += self._output.push(chat_events, logprobs[len(parts) :], is_cut=is_cut)
        if delta.finish_reason is not None:
            events += self._output.finish(is_cut=is_cut)
        return events

    def _logprobs(self, delta: Delta) -> list[bytes]:
        num_top = self._body.num_logprobs
        if num_top is None or delta.logprobs is None:
            return []
        return list(map(encode, chat_items(self._tokenizer, delta.logprobs, num_top)))

    def _render(self, events: list[Event], num_tokens: int) -> list[bytes]:
        """Return the frames of a step's events, in pieces; the last one contains its tokens."""
        pieces: list[bytes] = []
        for left, event in zip(reversed(range(len(events))), events, strict=True):
            if not self._is_new(event):
                continue
            event.sequence_number = self._number
            self._number += 1
            position = EventPosition(self._num_tokens, self._offset, event.sequence_number)
            if num_tokens and not left:
                position = EventPosition(self._num_tokens + num_tokens, 0, event.sequence_number)
            pieces += self._frame(event, position)
        if num_tokens:
            self._num_tokens += num_tokens
            self._offset = 0
        return pieces

    def _is_new(self, event: Event) -> bool:
        """Count an event, and remove the text that the client has; False: it has all of it."""
        delta = event if isinstance(event, _DELTAS) else None
        size = 1 if delta is None else len(delta.delta)
        self._offset += size
        num_known = min(size, self._num_known)
        self._num_known -= num_known
        if delta is not None:
            delta.delta = delta.delta[num_known:]
        return num_known < size

    def _frame(self, event: Event, position: EventPosition) -> list[bytes]:
        name, id_line = type_of(type(event)), self._id_line(position)
        return [b"event: %b\ndata: " % name, *self._lists.encoded(event), b"\n%b\n" % id_line]

    def _id_line(self, position: EventPosition) -> bytes:
        if not self._generation.is_resumable:
            return b""
        return position.id_line(self._generation.request_id)

    # The end ------------------------------------------------------------------------------------

    def _end(self) -> Response:
        is_cut = self._generation.sequences[0].finish_reason == FinishReason.LENGTH
        return self._close("incomplete" if is_cut else "completed")

    def _close(self, status: str, error: ResponseError | None = None) -> Response:
        """Return the response as it is in the end; a response that was cancelled stays so."""
        if self._final is not None:
            return self._final
        is_cut = status == "incomplete"
        self._final = msgspec.structs.replace(
            self._response,
            status=status,
            error=error,
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._output.items(),
            usage=self._usage(),
        )
        if self._final.store:
            stored = self._stored_form(self._final)
            if self._store.has_room(stored.num_bytes):
                self._stored = stored
            else:
                self._final.store = False
        return self._final

    def _stored_form(self, response: Response) -> StoredResponse:
        request = self._body.request
        assert isinstance(request.input, list)
        items = encode(with_ids(request.input, response.id))
        return StoredResponse(self._encoded(response), items, request.previous_response_id)

    def _usage(self) -> ResponseUsage:
        [sequence] = self._generation.sequences
        num_input, num_output = sequence.num_prompt_tokens, sequence.num_output_tokens
        reasoning = sequence.reasoning
        return ResponseUsage(
            num_input,
            InputTokensDetails(sequence.num_cached_tokens),
            num_output,
            OutputTokensDetails(0 if reasoning is None else reasoning.num_tokens),
            num_input + num_output,
        )


def _number(generation: Generation) -> str:
    """Return digits that cannot be guessed; with a journal, they are the same after a restart.

    They are not the request's: clients choose those, and may use one for several requests.
    """
    return generation.secret or secrets.token_hex(16)


def _response_of(
    state: ApiState, request: ResponsesBody, created: int, response_id: str
) -> Response:
    """Return the response before its output."""
    defaults, reasoning = state.text.defaults, request.reasoning
    form: dict[str, Any] = {"type": "text"}
    if request.text is not None and request.text.format is not None:
        form = msgspec.to_builtins(request.text.format)
    return Response(
        id=response_id,
        created_at=created,
        status="in_progress",
        frequency_penalty=request.frequency_penalty or 0.0,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=state.shown_model(request.model),
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        presence_penalty=request.presence_penalty or 0.0,
        previous_response_id=request.previous_response_id,
        reasoning=ReasoningSettings(
            None if reasoning is None else reasoning.effort,
            None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        ),
        store=request.is_stored,
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        text={"format": form, "verbosity": "medium"},
        tool_choice=request.tool_choice or "auto",
        tools=[msgspec.to_builtins(tool) for tool in request.tools or []],
        top_logprobs=request.top_logprobs or 0,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )
