"""The path of a generation request: body, prompt, sequences, response.

The routes that generate share it; a `GenerationApi` holds the differences between them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast

from api_proc.bodies import SamplingBody
from api_proc.chat.parser import OutputParser
from api_proc.errors import ApiError, from_request_error, internal
from api_proc.fairness.fair_gate import FairGate
from api_proc.generation.answer import Answer, MakeAnswer
from api_proc.generation.generation import Generation, MakeParser
from api_proc.generation.packing import packed_in_slices
from api_proc.generation.steps import Step, in_intervals
from api_proc.generation.structured import check_copies, grammar_of, name_field
from api_proc.http.connection import Connection
from api_proc.http.json_body import BodyDecoding, Turn
from api_proc.params import bad_word_ids, resolve_max_tokens, sampling_params
from api_proc.peers.forwarding import forward_session, note_session
from api_proc.resumption.event_ids import ParsePosition, StreamPosition, parse_event_id
from api_proc.resumption.session import DecodedRequest, Session, request_not_found
from api_proc.state import ApiState
from api_proc.text.output_sequence import Delta, OutputSequence, Prompt
from api_proc.text.thinking import thinking_budget
from protocol.api_core import AddRequest
from protocol.client.errors import RequestFailed
from protocol.client.packed_prompt import PromptIds
from protocol.message import TokenIds
from protocol.model_facts import ModelFacts
from protocol.process.failpoints import failpoint
from protocol.request_validation import generation_error
from protocol.sampling import Grammar, SamplingParams

_SEND_BYTES = 16 * 1024
"""Events are sent once their total size reaches this number of bytes."""
_SLICE_S = 0.002
_MANY_PARTS = 8192
"""Number of tokens with candidates that takes about ten milliseconds to render."""
_PARTS_PER_SEQUENCE = 16

log = logging.getLogger("troika.api")

Body = TypeVar("Body", bound=SamplingBody)
MakeParams = Callable[[TokenIds], SamplingParams]
"""Returns the parameters for a prompt."""


class _Decoded(NamedTuple, Generic[Body]):
    """A body, and what is needed to submit it."""

    body: Body
    facts: ModelFacts
    grammar: Grammar | None


def _unchanged(error: ApiError) -> ApiError:
    return error


@dataclass(frozen=True, kw_only=True)
class GenerationApi(Generic[Body]):
    """A route that generates text."""

    path: str
    decode: BodyDecoding[Body]
    prompt_param: str
    """Name of the field that holds the prompt."""
    tokenize: Callable[[ApiState, Body, ModelFacts], Coroutine[Any, Any, list[Prompt]]]
    restore_prompts: Callable[[Body, list[list[int]]], list[Prompt]]
    """Returns the prompts of a body in the journal, given their token ids."""
    make_answer: MakeAnswer
    make_parser: Callable[[ApiState, Body, TokenIds, str], OutputParser | None] | None = None
    """Returns the parser of a sequence's text, if it has one; see `Generation`."""
    constrain: Callable[[ApiState, Body, TokenIds, SamplingParams], SamplingParams] | None = None
    """Adds the constraints on the output of a prompt."""
    parse_position: ParsePosition = parse_event_id
    shown_error: Callable[[ApiError], ApiError] = _unchanged
    """Returns an error with the names that fields have in this route's bodies."""

    async def serve(self, state: ApiState, connection: Connection) -> None:
        """Handle one request; raises `ApiError` only before anything was sent."""
        try:
            await self._serve(state, connection)
        except ApiError as error:
            raise self.shown_error(error) from None

    async def _serve(self, state: ApiState, connection: Connection) -> None:
        note_session(state, connection)
        raw = await connection.read_body(state.config.api.max_body_bytes)
        if await forward_session(state, connection, raw):
            return
        if await self._resume(state, connection, raw):
            return
        with Turn(state.large_requests) as turn:
            decoded = await self._decode(state, connection, raw, turn)
            make_parser = self._parser_maker(state, decoded.body)
            with Generation(
                state,
                decoded.body,
                connection,
                make_parser=make_parser,
                adapter=state.require_model(decoded.body.model),
            ) as generation:
                await turn.rest()
                if not await self._accept(state, connection, raw, decoded, generation, turn=turn):
                    return
                # What the answer does not need is freed: many requests may wait for the engine.
                body, raw = decoded.body, b""
                del decoded
                turn.end()
                if not generation.cancelled:
                    await generation.accepted()
                    await self._answer(state, connection, body, generation)

    async def _decode(
        self, state: ApiState, connection: Connection, raw: bytes, turn: Turn
    ) -> "_Decoded[Body]":
        facts = await state.accepting(connection.origin)
        body, unknown = await self.decode.in_slices(raw, turn)
        connection.lease.reserve_values(turn.num_values)
        connection.headers += state.unknown_fields.check(raw, unknown)
        body.check()
        return _Decoded(body, facts, grammar_of(body))

    async def _accept(
        self,
        state: ApiState,
        connection: Connection,
        raw: bytes,
        decoded: "_Decoded[Body]",
        generation: Generation,
        *,
        turn: Turn,
    ) -> bool:
        """Submit all sequences; False: the request has ended, or its answer was another's."""
        body, facts, grammar = decoded
        if (error := generation_error(facts)) is not None:
            raise from_request_error(error, self.prompt_param)
        try:
            prompts = await generation.prepare(self.tokenize(state, body, facts))
            forms = await packed_in_slices([ids for ids, _ in prompts], facts, turn)
        except RequestFailed as failure:
            raise from_request_error(failure.error, self.prompt_param) from failure
        if generation.cancelled:
            return False
        if await self._resume(state, connection, raw, turn):  # a duplicate has been accepted
            return False
        num_sequences = len(prompts) * body.num_sequences
        check_copies(grammar, num_sequences, body)
        connection.lease.count_sequences(num_sequences)
        generation.begin_session(self.path, raw, prompts)
        make_params = self._params_maker(state, body, facts, grammar)
        await self._submit(generation, forms, make_params, turn)
        return True

    def decode_accepted(self, raw: bytes, adds: list[AddRequest]) -> DecodedRequest:
        """Decode a request of the journal."""
        body = self.decode(raw)
        token_ids = [add.unpacked_prompt for add in adds[:: body.num_sequences]]
        return DecodedRequest(body, self.restore_prompts(body, token_ids))

    async def _resume(
        self, state: ApiState, connection: Connection, raw: bytes, turn: Turn | None = None
    ) -> bool:
        """Continue the response to a request that was accepted earlier; False: it was not."""
        last_event_id = connection.last_event_id
        if state.sessions is None:
            if last_event_id is not None:
                raise request_not_found(connection.request_id)
            return False
        if state.sessions.is_submitting(connection.request_id):
            if turn is not None:
                turn.end()  # the connection that submits the request may need this place
            await state.sessions.submitted(connection.request_id)
        session = state.sessions.find(connection.request_id, self.path, raw, last_event_id)
        if session is None:
            return False
        if turn is not None:
            turn.end()
        make_parser = self._parser_maker(state, cast(Body, session.body))
        with Generation(
            state, session.body, connection, session, make_parser=make_parser
        ) as generation:
            generation.resume(self._position(session, last_event_id))
            await self._answer(state, connection, cast(Body, session.body), generation)
        return True

    def _parser_maker(self, state: ApiState, body: Body) -> MakeParser | None:
        make_parser = self.make_parser
        if make_parser is None:
            return None
        return lambda token_ids, key: make_parser(state, body, token_ids, key)

    def _params_maker(
        self, state: ApiState, body: Body, facts: ModelFacts, grammar: Grammar | None
    ) -> MakeParams:
        bad_words = bad_word_ids(body.bad_words or [], state.text.tokenizer)

        def make_params(token_ids: TokenIds) -> SamplingParams:
            params = sampling_params(
                body,
                state.text.defaults,
                max_tokens=resolve_max_tokens(body, state.text.defaults, facts, len(token_ids)),
                seed=state.draw_seed() if body.seed is None else body.seed,
                vocab_size=facts.vocab_size,
                bad_words=bad_words,
                grammar=grammar,
                thinking_budget=thinking_budget(state.text, token_ids, body.thinking_token_budget),
            )
            if self.constrain is None:
                return params
            return self.constrain(state, body, token_ids, params)

        return make_params

    async def _submit(
        self, generation: Generation, forms: list[PromptIds], make_params: MakeParams, turn: Turn
    ) -> None:
        """Send all prompts to the core in slices; `forms` are the prompts in the form to submit."""
        began = time.perf_counter()
        try:
            for (token_ids, _), form in zip(generation.prompts, forms, strict=True):
                for _ in generation.submit(form, token_ids, make_params(token_ids)):
                    if time.perf_counter() - began > _SLICE_S:
                        await turn.pause()
                        if generation.cancelled:
                            return
                        began = time.perf_counter()
        except RequestFailed as failure:
            error = generation.refusal(failure.error)
            raise from_request_error(error, self.prompt_param) from failure

    async def _answer(
        self, state: ApiState, connection: Connection, body: Body, generation: Generation
    ) -> None:
        answer = self.make_answer(state, connection, body, generation)
        failpoint("api.after_accept")
        try:
            if body.stream:
                await _send_stream(state, body, connection, generation, answer)
            else:
                async for step in generation.steps():
                    for sequence, delta in step:
                        answer.collect(sequence, delta)
                if not generation.cancelled:
                    pieces = await _whole(state, body, generation, answer)
                    await answer.keep()
                    await connection.send_pieces(pieces)
        except RequestFailed as failure:
            generation.note_failure(failure)
            error = name_field(generation.refusal(failure.error), body)
            await self._fail(connection, answer, from_request_error(error, self.prompt_param))
        except ApiError as error:  # about the client's position; the request itself has not failed
            await self._fail(connection, answer, error, is_final=False)
        except Exception:
            if not (body.stream and connection.response_started):
                raise
            log.exception("request %s failed", connection.request_id)
            await self._fail(connection, answer, internal())

    async def _fail(
        self, connection: Connection, answer: Answer, error: ApiError, *, is_final: bool = True
    ) -> None:
        """Send an error as an event if the status line has been sent; otherwise raise it.

        `is_final`: the response ends this way for other connections too.
        """
        if not connection.response_started:
            raise error
        frames = answer.failure(self.shown_error(error))
        if is_final:
            await answer.keep()
        await connection.send_frames(frames, more=False)

    def _position(self, session: Session, last_event_id: str | None) -> StreamPosition:
        """Return the position at which the response continues."""
        if not session.body.stream or last_event_id is None:
            return StreamPosition([None] * len(session.histories))
        limits = [add.sampling_params.max_tokens for add in session.accepted.adds]
        return self.parse_position(last_event_id, session.request_id, limits)


async def _whole(
    state: ApiState, body: SamplingBody, generation: Generation, answer: Answer
) -> list[bytes]:
    """Render a response; one with very many parts is rendered in a thread, one at a time."""
    num_tokens = sum(
        sequence.num_output_tokens + _num_prompt_tokens(body, sequence)
        for sequence in generation.sequences
    )
    num_parts = len(generation.sequences) * _PARTS_PER_SEQUENCE
    if num_parts + num_tokens * _num_candidates(body) < _MANY_PARTS:
        return answer.body()
    async with state.large_answers.inside_if_soon():
        return await asyncio.to_thread(answer.body)


def _num_candidates(body: SamplingBody) -> int:
    """Return the parts of an answer for each token."""
    return 1 + max(body.num_logprobs or 0, body.num_prompt_logprobs or 0)


def _num_prompt_tokens(body: SamplingBody, sequence: OutputSequence) -> int:
    """Return how many tokens of the prompt an answer shows with a sequence."""
    return sequence.num_prompt_tokens if body.echoes_prompt else len(sequence.prompt_logprobs)


async def _send_stream(
    state: ApiState,
    body: SamplingBody,
    connection: Connection,
    generation: Generation,
    answer: Answer,
) -> None:
    """Send deltas as server-sent events; the events of one step are sent together."""
    connection.keep_alive()
    steps = generation.steps(answer.skip)
    if generation.stream_interval > 1:
        steps = in_intervals(steps, generation.stream_interval)
    renderer = _Renderer(answer, state.large_answers, body)
    async for step in steps:
        await _send_step(connection, renderer, step)
    if not generation.cancelled:
        frames = answer.last_frames()
        await answer.keep()
        await connection.send_frames(frames, more=False)


class _Renderer:
    """Renders the events of a stream; those with very many parts in a thread, one at a time."""

    def __init__(self, answer: Answer, turn: FairGate, body: SamplingBody) -> None:
        self._answer = answer
        self._turn = turn
        self._body = body
        self._num_candidates = _num_candidates(body)
        self._begun: set[int] = set()
        """Sequences whose first tokens, and with them the prompt, were rendered."""

    async def frames(self, sequence: OutputSequence, delta: Delta) -> list[bytes]:
        """Return the events for a delta."""
        num_tokens = len(delta.token_ids)
        if sequence.index not in self._begun and delta.num_computed_tokens is None:
            self._begun.add(sequence.index)
            num_tokens += _num_prompt_tokens(self._body, sequence)
        if num_tokens * self._num_candidates < _MANY_PARTS:
            return self._answer.frames(sequence, delta)
        async with self._turn.inside_if_soon():
            return await asyncio.to_thread(self._answer.frames, sequence, delta)


async def _send_step(connection: Connection, renderer: _Renderer, step: Step) -> None:
    """Render and send the events of one step, in pieces of about `_SEND_BYTES` at most."""
    pieces: list[bytes] = []
    num_bytes = 0
    for i, (sequence, delta) in enumerate(step, start=1):
        events = await renderer.frames(sequence, delta)
        pieces += events
        num_bytes += sum(map(len, events))
        if pieces and (num_bytes >= _SEND_BYTES or i == len(step)):
            failpoint("api.before_flush")
            await connection.send_frames(pieces)
            pieces, num_bytes = [], 0
            if i < len(step):
                await asyncio.sleep(0)  # let other requests run between the pieces
