"""The sequences of one HTTP request: submit, read, cancel, measure."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import msgspec

from api_proc.bodies import SamplingBody
from api_proc.chat.parser import OutputParser
from api_proc.errors import counted_as, invalid
from api_proc.generation.beam_search import search_options
from api_proc.generation.delta_reader import DeltaReader, OnSkipped
from api_proc.generation.steps import Step
from api_proc.http.access_log import GenerationRecord
from api_proc.http.connection import Connection
from api_proc.http.open_requests import OpenResponse, Slot
from api_proc.http.scope import GENERATION_KEY
from api_proc.params import nth_seed
from api_proc.resumption.event_ids import StreamPosition, beyond_the_end
from api_proc.resumption.history import HistoryReader
from api_proc.resumption.session import DecodedRequest, Session, deadline_error
from api_proc.resumption.sessions import Sessions
from api_proc.state import ApiState
from api_proc.text.beam_search import BeamSearch, BeamStream
from api_proc.text.output_sequence import OutputSequence, Prompt, StopStrings, TokenStream
from protocol.adapters import Adapter
from protocol.api_core import AddRequest, ErrorCode, RequestError
from protocol.client.errors import RequestFailed, failure_of
from protocol.client.ledger import RoutedOptions, check_request
from protocol.client.packed_prompt import PromptIds, extended
from protocol.client.request_stream import RequestStream
from protocol.message import TokenIds
from protocol.sampling import FinishReason, SamplingParams

_NO_PROMPT = Prompt([], None)
MakeParser = Callable[[TokenIds, str], OutputParser | None]


class Generation:
    """All sequences of one HTTP request, or one connection's readers of a session.

    On exit all sequences end, except those of a session whose client may return.
    """

    def __init__(
        self,
        state: ApiState,
        body: SamplingBody,
        connection: Connection,
        session: Session | None = None,
        *,
        make_parser: MakeParser | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """`make_parser` returns the parser of a sequence's text, given its prompt and a key.

        `adapter` applies to sequences that are submitted here.
        """
        self._adapter = adapter
        self._make_parser = make_parser
        self.prompts: list[Prompt] = [] if session is None else session.prompts
        """Empty ones once they were submitted, if neither the answer nor a session needs them."""
        self._num_prompt_tokens = _num_tokens(self.prompts)
        self.sequences: list[OutputSequence] = []
        self.cancelled = False
        self.created = int(time.time()) if session is None else session.accepted.created
        self.request_id = connection.request_id
        self.response: OpenResponse | None = None
        self.position: StreamPosition | None = None
        """The end of an earlier answer, which this one continues."""
        self._state = state
        self._connection = connection
        self._session = session
        self._is_accepted = session is not None
        self._deadline: asyncio.TimerHandle | None = None
        self._preparing: asyncio.Future[list[Prompt]] | None = None
        self._failure: RequestFailed | None = None
        """Set when the deadline has passed."""
        self._readers: list[HistoryReader] = []
        """Used with a session."""
        self._streams: list[RequestStream | BeamStream] = []
        """Used without a session."""
        self._body = body
        self._metrics = state.metrics
        self.arrival = time.monotonic()
        self._reader = DeltaReader(
            body, state.metrics, request_id=self.request_id, arrival=self.arrival
        )

    def __enter__(self) -> "Generation":
        self._state.open_requests.add(self)
        if self._session is not None:
            self._sessions.attach(self._session)
        self._connection.watch(self.cancel, lambda: self.num_unread)
        if self._body.timeout is not None and not self._is_accepted:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(self._body.timeout, self._expire)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_sent = kind is None and not self.cancelled
        self.cancel()
        self._connection.scope[GENERATION_KEY] = GenerationRecord(
            self._num_prompt_tokens,
            0 if self._body.is_echo_alone else self._num_output_tokens,
            self._queue_time_s,
            self._reader.time_to_first_token_s,
            is_sent,
        )
        if self._deadline is not None:
            self._deadline.cancel()
        session = self._session
        if session is not None:
            if not self._is_accepted:  # it was rejected, or its client has disconnected
                self._sessions.remove(session)
            connection = self._connection
            is_stream = bool(self._body.stream) and connection.response_started
            is_known = is_stream or connection.has_client_id
            self._sessions.detach(session, is_known=is_known, is_sent=is_sent)
        self._state.open_requests.remove(self)
        self.response = None  # its reference would delay freeing memory

    @property
    def is_resumable(self) -> bool:
        """True if the client can read the rest over another connection."""
        return self._session is not None

    @property
    def secret(self) -> str | None:
        """32 random hexadecimal digits that are kept across restarts; None without a journal."""
        return None if self._session is None else self._session.accepted.secret

    @property
    def stream_interval(self) -> int:
        return self._body.stream_interval or 1

    def fail(self, error: RequestFailed) -> None:
        """End with an error, unless the request is in a journal and continues later."""
        for stream in self._streams:
            stream.fail(error)
            stream.cancel()

    def _fail_for_good(self, error: RequestFailed) -> None:
        """End with an error that other connections to the session also receive."""
        self.fail(error)
        if self._session is not None:
            self._sessions.fail(self._session, error)

    def _expire(self) -> None:
        """End with an error because the client's time limit has passed."""
        assert self._body.timeout is not None
        self._failure = deadline_error(self._body.timeout)
        if self._preparing is not None:
            self._preparing.cancel()
        self._fail_for_good(self._failure)

    @property
    def _sessions(self) -> Sessions:
        assert self._state.sessions is not None
        return self._state.sessions

    @property
    def num_unread(self) -> int:
        """Tokens that have arrived but are not yet sent to the client."""
        return sum(sequence.stream.num_unread for sequence in self.sequences)

    def begin_session(self, path: str, raw: bytes, prompts: list[Prompt]) -> None:
        """Set the prompts; begin a session if there is a journal and the client can return."""
        self.prompts = prompts
        self._num_prompt_tokens = _num_tokens(prompts)
        knows_id = bool(self._body.stream) or self._connection.has_client_id
        # The requests of a beam search are not those of the client.
        if self._state.sessions is not None and knows_id and not self._body.use_beam_search:
            request_id = self._connection.request_id
            decoded = DecodedRequest(self._body, prompts)
            age_s = time.monotonic() - self.arrival
            self._session = self._sessions.begin(
                request_id, path, raw, decoded, age_s=age_s, origin=self._connection.origin
            )
            self._sessions.attach(self._session)
            self._connection.lease.pass_sequences(self._session.lease)
            self.created = self._session.accepted.created  # the same for all its connections

    async def prepare(self, work: Coroutine[Any, Any, list[Prompt]]) -> list[Prompt]:
        """Make the prompts, until the client disconnects or the deadline passes.

        Returns no prompts if the generation is cancelled. Raises RequestFailed if the deadline has
        passed.
        """
        self._preparing = asyncio.ensure_future(work)
        try:
            return await self._preparing
        except asyncio.CancelledError:
            if self._failure is not None:
                raise self._failure from None
            if not self.cancelled:
                raise
            return []
        finally:
            self._preparing = None

    async def accepted(self) -> None:
        """Mark all sequences as submitted, and wait until the session is in the journal."""
        self._is_accepted = True
        if self._session is None and not self._body.shows_prompt:
            self.prompts = [_NO_PROMPT] * len(self.prompts)
        if self._session is not None:
            if self._deadline is not None:
                self._deadline.cancel()  # the session's own deadline outlives the connection
            await self._sessions.accept(self._session)

    def submit(
        self, prompt: PromptIds, prompt_token_ids: TokenIds, params: SamplingParams
    ) -> Iterator[None]:
        """Send a prompt to the core for each of its sequences, yielding after each.

        `prompt_token_ids` are those of `prompt`, which may be packed.
        """
        if self._failure is not None:
            raise self._failure
        if self._body.use_beam_search:
            self._search(prompt, prompt_token_ids, params)
            return
        num_sequences = self._body.num_sequences
        for i in range(num_sequences):
            nth = params
            if i:
                # Prompt logprobs are the same for all sequences and come with the first one.
                seed = nth_seed(params.seed, i)
                nth = msgspec.structs.replace(
                    params, seed=seed, prompt_logprobs=None, return_progress=False
                )
            stream: TokenStream
            options = self._options
            if self._session is None:
                stream = self._state.client.submit(prompt, nth, **options)
                self._streams.append(stream)
            else:
                stream = self._sessions.submit(self._session, prompt, nth, **options)
                self._readers.append(stream)
            self._add(stream, prompt_token_ids, nth, accepted_at=time.monotonic())
            yield
        self._metrics.params_n.observe(num_sequences)
        self._metrics.params_max_tokens.observe(params.max_tokens)
        self._metrics.prompt_tokens.observe(len(prompt_token_ids))

    @property
    def _options(self) -> RoutedOptions:
        """Return the core's options besides the parameters."""
        options = self._body.request_options
        options["origin"] = self._connection.origin
        if self._adapter is not None:
            options["adapter"] = self._adapter
        key = self._state.config.parallel.session_key
        if key is not None:
            options["affinity"] = self._affinity(key, options["cache_salt"])
        return options

    def _affinity(self, key: str, cache_salt: str) -> str:
        """Return the value that determines the replica; empty: none does."""
        if key == "cache_salt":
            return cache_salt
        value: bytes = dict(self._connection.scope["headers"]).get(key.lower().encode(), b"")
        return value.decode("latin-1")

    def _search(
        self, prompt: PromptIds, prompt_token_ids: TokenIds, params: SamplingParams
    ) -> None:
        """Start a beam search for one prompt; it sends its requests as it proceeds."""
        if params.grammar is not None:
            message = "cannot be combined with tools or formats that confine the answer"
            raise invalid("use_beam_search", message)
        client, options = self._state.client, self._options
        facts = self._state.require_facts()  # the last replica may have left in the meantime
        check_request(AddRequest(0, [], params), facts, prompt)

        def submit(token_ids: TokenIds, step_params: SamplingParams) -> RequestStream:
            options["resent"] = bool(token_ids)
            try:
                return client.submit(extended(prompt, token_ids), step_params, **options)
            except RequestFailed as failure:
                failure.is_refusal = not token_ids  # a search that has begun was accepted
                raise

        suppressed = self._state.text.defaults.suppressed(facts.vocab_size, None)
        search = search_options(self._body, params.max_tokens, facts.eos_token_ids, suppressed)
        for stream in BeamSearch(submit, search).streams():
            self._streams.append(stream)
            self._add(stream, prompt_token_ids, params)

    def resume(self, position: StreamPosition) -> None:
        """Read the session's sequences from a position on instead of submitting new ones.

        ApiError: one of them ended before that position.
        """
        assert self._session is not None
        for num_sent, history in zip(position.num_sent, self._session.histories, strict=True):
            num_tokens = len(history.token_ids)
            if history.finish_reason is not None and (num_sent or 0) > num_tokens:
                raise beyond_the_end(self.request_id, num_sent or 0, num_tokens)
        self.position = position
        num_each = self._body.num_sequences
        for index, history in enumerate(self._session.histories):
            reader = self._sessions.reader(history)
            self._readers.append(reader)
            prompt = self.prompts[index // num_each]
            params = self._session.accepted.adds[index].sampling_params
            self._add(reader, prompt.token_ids, params)

    def _add(
        self,
        stream: TokenStream,
        prompt_token_ids: TokenIds,
        params: SamplingParams,
        *,
        accepted_at: float | None = None,
    ) -> None:
        body = self._body
        text = self._state.text
        tokenizer = text.tokenizer
        parser = None
        if self._make_parser is not None:
            # The key is the same after a restart of the API, but differs for a later request.
            key = f"{self._connection.request_id} {self.created} {len(self.sequences)}"
            parser = self._make_parser(prompt_token_ids, key)
        detokenizer = tokenizer.detokenizer(
            prompt_token_ids,
            skip_special_tokens=body.skip_special_tokens is not False,
            shown=frozenset() if parser is None else text.dialect.markers,
        )
        sequence = OutputSequence(
            len(self.sequences),
            stream,
            detokenizer,
            num_prompt_tokens=len(prompt_token_ids),
            stop=StopStrings(
                body.stop_strings, bool(body.include_stop_str_in_output), params.min_tokens
            ),
            parser=parser,
            reasoning=None if parser is None else parser.reasoning_counter(tokenizer.token_bytes),
            accepted_at=accepted_at,
        )
        if body.num_prompt_logprobs is not None and params.prompt_logprobs is None:
            first = self.sequences[sequence.index - sequence.index % body.num_sequences]
            sequence.prompt_logprobs = first.prompt_logprobs
        self.sequences.append(sequence)

    def cancel(self) -> None:
        """Abort all sequences, or leave those of a session running."""
        self.cancelled = True
        if self._preparing is not None:
            self._preparing.cancel()
        self._reader.cancel()
        for reader in self._readers:
            reader.leave()
        self._end_all(FinishReason.ABORT)

    def note_failure(self, failure: RequestFailed) -> None:
        """Count the sequences that have not ended, by the failure's finish reason."""
        self._end_all(counted_as(failure))

    def refusal(self, error: RequestError) -> RequestError:
        """Return an error of the engine as the client gets it; see `ApiState.refusal`."""
        num_each = self._body.num_sequences
        num_tokens = num_each * self._num_prompt_tokens
        return self._state.refusal(error, num_each * len(self.prompts), num_tokens)

    def _end_all(self, reason: FinishReason | None) -> None:
        """End the open sequences; those of a session are counted by the session itself.

        Without a reason they were refused, and are not counted.
        """
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = reason or FinishReason.ERROR
                if self._session is None:
                    if reason is not None:
                        self._metrics.count_end(reason)
                    sequence.stream.cancel()

    def abort(self) -> bool:
        """End all sequences with an error for the client; False: none was submitted yet."""
        error = RequestError(ErrorCode.ABORTED, "the request was aborted")
        self._fail_for_good(failure_of(error))
        return bool(self.sequences)

    @property
    def _num_output_tokens(self) -> int:
        return sum(sequence.num_output_tokens for sequence in self.sequences)

    @property
    def _queue_time_s(self) -> float | None:
        """Seconds until the engine began with any sequence."""
        known = (sequence.queue_time_s for sequence in self.sequences)
        return min((seconds for seconds in known if seconds is not None), default=None)

    def slot(self) -> Slot:
        num_output_tokens = self._num_output_tokens
        return Slot(
            path=self._connection.scope["path"],
            state="running" if num_output_tokens else "waiting",
            age_s=round(time.monotonic() - self.arrival, 3),
            num_sequences=len(self.sequences),
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=num_output_tokens,
        )

    def steps(self, on_skipped: OnSkipped | None = None) -> AsyncIterator[Step]:
        """Iterate over deltas until all sequences have ended or the generation is cancelled.

        `on_skipped` receives the deltas that an earlier answer contained.
        """
        histories = () if self._session is None else self._session.histories
        return self._reader.steps(
            self.sequences, histories, position=self.position, on_skipped=on_skipped
        )


def _num_tokens(prompts: list[Prompt]) -> int:
    return sum(len(prompt.token_ids) for prompt in prompts)
