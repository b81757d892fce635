"""The sequences of one HTTP request: submit, read, cancel, measure."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec

from api_proc.bodies import SamplingBody
from api_proc.chat.parser import OutputParser
from api_proc.http.access_log import GENERATION_KEY, GenerationRecord
from api_proc.http.connection import Connection
from api_proc.http.open_requests import Slot
from api_proc.params import nth_seed
from api_proc.resumption.event_ids import StreamPosition
from api_proc.resumption.history import HistoryReader
from api_proc.resumption.sessions import DecodedRequest, Session, Sessions
from api_proc.state import ApiState
from api_proc.text.output_sequence import Delta, OutputSequence, Prompt, TokenStream, join
from protocol.api_core import ErrorCode, RequestError, RequestOutput
from protocol.client.errors import RequestFailed, failure_of
from protocol.client.request_stream import RequestStream
from protocol.message import TokenIds
from protocol.sampling import FinishReason, SamplingParams

MakeParser = Callable[[TokenIds, str], OutputParser | None]

Step = list[tuple[OutputSequence, Delta]]
"""Deltas that arrived together, in their order."""

_PIECE_TOKENS = 256
"""Tokens that become text at a time, so that unread tokens stay ids."""
_PIECE_LOGPROBS = 16
"""The same for tokens with logprobs."""
_STARTED_TOGETHER = 64
"""Readers of sequences that begin in one iteration of the event loop."""


class Generation:
    """All sequences of one HTTP request, or one connection's readers of a session.

    At its exit all sequences end, except those of a session whose client may come back.
    """

    def __init__(
        self,
        state: ApiState,
        body: SamplingBody,
        connection: Connection,
        session: Session | None = None,
        make_parser: MakeParser | None = None,
    ) -> None:
        """`make_parser` returns the parser of a sequence's text, given its prompt and a key."""
        self._make_parser = make_parser
        self.prompts: list[Prompt] = [] if session is None else session.prompts
        self.sequences: list[OutputSequence] = []
        self.cancelled = False
        self.created = int(time.time()) if session is None else session.accepted.created
        self.request_id = connection.request_id
        self.position: StreamPosition | None = None
        """The end of an earlier answer, which this one continues."""
        self._state = state
        self._connection = connection
        self._session = session
        self._is_accepted = session is not None
        self._deadline: asyncio.TimerHandle | None = None
        self._failure: RequestFailed | None = None
        """Set when the deadline has passed."""
        self._readers: list[HistoryReader] = []
        """With a session."""
        self._streams: list[RequestStream] = []
        """Without one."""
        self._body = body
        self._metrics = state.metrics
        self._arrival = time.monotonic()
        self._time_to_first_token_s: float | None = None

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
            sum(len(prompt.token_ids) for prompt in self.prompts),
            sum(sequence.num_output_tokens for sequence in self.sequences),
            self._time_to_first_token_s,
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

    @property
    def is_resumable(self) -> bool:
        """Whether the client can read the rest over another connection."""
        return self._session is not None

    @property
    def stream_interval(self) -> int:
        return self._body.stream_interval or 1

    def fail(self, error: RequestFailed) -> None:
        """End with an error, unless the request is in a journal and continues later."""
        for stream in self._streams:
            stream.fail(error)
            stream.cancel()

    def _fail_for_good(self, error: RequestFailed) -> None:
        """End with an error, which another connection to the session receives too."""
        self.fail(error)
        if self._session is not None:
            self._sessions.fail(self._session, error)

    def _expire(self) -> None:
        """End with an error, because the time that the client allowed is over."""
        message = f"timeout: {self._body.timeout:g} s were not enough"
        self._failure = RequestFailed(RequestError(ErrorCode.DEADLINE, message))
        self._fail_for_good(self._failure)

    @property
    def _sessions(self) -> Sessions:
        assert self._state.sessions is not None
        return self._state.sessions

    @property
    def num_unread(self) -> int:
        """Tokens that were received and not sent to the client yet."""
        return sum(sequence.stream.num_unread for sequence in self.sequences)

    def begin_session(self, path: str, raw: bytes, prompts: list[Prompt]) -> None:
        """Take the prompts; begin a session, if there is a journal and the client can return."""
        self.prompts = prompts
        knows_id = bool(self._body.stream) or self._connection.has_client_id
        if self._state.sessions is not None and knows_id:
            request_id = self._connection.request_id
            decoded = DecodedRequest(self._body, prompts)
            self._session = self._sessions.begin(request_id, path, raw, decoded)
            self._sessions.attach(self._session)
            self.created = self._session.accepted.created  # the same for all its connections

    async def accepted(self) -> None:
        """Mark all sequences as submitted, and wait until the session is in the journal."""
        self._is_accepted = True
        if self._session is not None:
            await self._sessions.accept(self._session)

    def submit(self, prompt_token_ids: TokenIds, params: SamplingParams) -> None:
        """Send one prompt to the core, `n` times."""
        if self._failure is not None:
            raise self._failure
        num_sequences = self._body.n or 1
        for i in range(num_sequences):
            nth = params
            if i:
                # The prompt is the same, so its logprobs are computed once. In a stream another
                # sequence may begin before them.
                num_top = params.prompt_logprobs if self._body.stream else None
                seed = nth_seed(params.seed, i)
                nth = msgspec.structs.replace(params, seed=seed, prompt_logprobs=num_top)
            stream: TokenStream
            if self._session is None:
                options = self._body.request_options
                stream = self._state.client.submit(prompt_token_ids, nth, **options)
                self._streams.append(stream)
            else:
                stream = self._sessions.submit(self._session, prompt_token_ids, nth)
                self._readers.append(stream)
            self._add(stream, prompt_token_ids, nth)
        self._metrics.params_n.observe(num_sequences)
        self._metrics.params_max_tokens.observe(params.max_tokens)
        self._metrics.prompt_tokens.observe(len(prompt_token_ids))

    def resume(self, position: StreamPosition) -> None:
        """Read the session's sequences from a position on instead of submitting new ones."""
        assert self._session is not None
        self.position = position
        num_each = self._body.n or 1
        for index, history in enumerate(self._session.histories):
            reader = self._sessions.reader(self._session, history)
            self._readers.append(reader)
            prompt = self.prompts[index // num_each]
            params = self._session.accepted.adds[index].sampling_params
            self._add(reader, prompt.token_ids, params)

    def _add(self, stream: TokenStream, prompt_token_ids: TokenIds, params: SamplingParams) -> None:
        body = self._body
        text = self._state.text
        parser = None
        if self._make_parser is not None:
            # The same key after a restart of the API, and another one for a later request.
            key = f"{self._connection.request_id} {self.created} {len(self.sequences)}"
            parser = self._make_parser(prompt_token_ids, key)
        detokenizer = text.tokenizer.detokenizer(
            prompt_token_ids,
            skip_special_tokens=body.skip_special_tokens is not False,
            shown=frozenset() if parser is None else text.dialect.markers,
        )
        sequence = OutputSequence(
            len(self.sequences),
            stream,
            detokenizer,
            num_prompt_tokens=len(prompt_token_ids),
            stop=body.stop_strings,
            include_stop=bool(body.include_stop_str_in_output),
            min_tokens=params.min_tokens,
            parser=parser,
        )
        if body.num_prompt_logprobs is not None and params.prompt_logprobs is None:
            first = self.sequences[sequence.index - sequence.index % (body.n or 1)]
            sequence.prompt_logprobs = first.prompt_logprobs
        self.sequences.append(sequence)

    def cancel(self) -> None:
        """Abort all sequences, or leave those of a session running."""
        self.cancelled = True
        for reader in self._readers:
            reader.leave()
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = FinishReason.ABORT
                if self._session is None:
                    self._metrics.count_end(FinishReason.ABORT)
                    sequence.stream.cancel()

    def abort(self) -> bool:
        """End all sequences with an error for the client; False: none was submitted yet."""
        error = RequestError(ErrorCode.ABORTED, "the request was aborted")
        self._fail_for_good(failure_of(error))
        return bool(self.sequences)

    def slot(self) -> Slot:
        num_output_tokens = sum(sequence.num_output_tokens for sequence in self.sequences)
        return Slot(
            path=self._connection.scope["path"],
            state="running" if num_output_tokens else "waiting",
            age_s=round(time.monotonic() - self._arrival, 3),
            num_sequences=len(self.sequences),
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            num_output_tokens=num_output_tokens,
        )

    async def steps(self) -> AsyncIterator[Step]:
        """Iterate over deltas until all sequences have ended or the generation is cancelled."""
        if len(self.sequences) == 1:
            sequence = self.sequences[0]
            async for delta in self._deltas(sequence):
                yield [(sequence, delta)]
            return
        async for step in self._merged():
            yield step

    async def _merged(self) -> AsyncIterator[Step]:
        """Merge the sequences; one task reads each, and waits until its delta is taken."""
        queue: asyncio.Queue[tuple[OutputSequence, Delta] | Exception | None]
        queue = asyncio.Queue(maxsize=len(self.sequences))

        async def read(sequence: OutputSequence) -> None:
            try:
                async for delta in self._deltas(sequence):
                    await queue.put((sequence, delta))
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        readers: list[asyncio.Task[None]] = []
        num_reading = len(self.sequences)
        try:
            for sequence in self.sequences:
                readers.append(asyncio.create_task(read(sequence)))
                if len(readers) % _STARTED_TOGETHER == 0:
                    await asyncio.sleep(0)
            while num_reading:
                step: Step = []
                items = [await queue.get()]
                while not queue.empty():
                    items.append(queue.get_nowait())
                for item in items:
                    if isinstance(item, Exception):
                        raise item
                    if item is None:
                        num_reading -= 1
                    else:
                        step.append(item)
                if step:
                    yield step
        finally:
            for reader in readers:
                reader.cancel()

    async def _deltas(self, sequence: OutputSequence) -> AsyncIterator[Delta]:
        metrics = self._metrics
        last = first = 0.0
        skip = (self.position.num_sent[sequence.index] or 0) if self.position else 0
        async for output in sequence.stream:
            if output.token_ids:
                now = time.monotonic()
                if last:
                    metrics.inter_token_latency.observe(now - last)
                else:
                    first = now
                    metrics.time_to_first_token.observe(now - self._arrival)
                    if self._time_to_first_token_s is None:
                        self._time_to_first_token_s = now - self._arrival
                last = now
            for piece in _pieces(output, skip - sequence.num_output_tokens):
                delta = sequence.push(piece)
                if skip and sequence.num_output_tokens <= skip:  # an earlier answer contained it
                    if delta.finish_reason is not None:
                        if sequence.num_output_tokens < skip:  # the client has different tokens
                            text = f"the answer ends before token {skip}, which was sent before"
                            raise RequestFailed(RequestError(ErrorCode.INTERNAL, text))
                        return
                    await asyncio.sleep(0)  # let other requests run while many tokens are skipped
                elif delta.finish_reason is not None:
                    self._finish(sequence, first, last)
                    yield delta
                    return
                elif piece.token_ids:
                    yield delta

    def _finish(self, sequence: OutputSequence, first: float, last: float) -> None:
        assert sequence.finish_reason is not None
        if self._session is None or self._session.histories[sequence.index].count_end():
            self._observe_end(sequence, first, last)
        if sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            message = f"the engine ended the request: {sequence.finish_reason}"
            raise RequestFailed(RequestError(ErrorCode.INTERNAL, message))

    def _observe_end(self, sequence: OutputSequence, first: float, last: float) -> None:
        metrics = self._metrics
        metrics.count_end(str(sequence.finish_reason))
        metrics.e2e_request_latency.observe(time.monotonic() - self._arrival)
        metrics.generation_tokens.observe(sequence.num_output_tokens)
        if sequence.num_output_tokens > 1:
            metrics.time_per_output_token.observe((last - first) / (sequence.num_output_tokens - 1))


async def in_intervals(steps: AsyncIterator[Step], num_tokens: int) -> AsyncIterator[Step]:
    """Merge deltas until each has `num_tokens`, except the first and the last of a sequence."""
    held: dict[int, list[Delta]] = {}
    async for step in steps:
        merged: Step = []
        for sequence, delta in step:
            index = sequence.index
            known = held.get(index)
            deltas = [*(known or ()), delta]
            is_full = sum(len(item.token_ids) for item in deltas) >= num_tokens
            is_ready = known is None or is_full or delta.finish_reason is not None
            if is_ready:
                merged.append((sequence, join(deltas)))
            held[index] = [] if is_ready else deltas
        if merged:
            yield merged


def _pieces(output: RequestOutput, num_first: int) -> Iterator[RequestOutput]:
    """Split an output after its first `num_first` tokens, and wherever a piece gets too large."""
    size = _PIECE_TOKENS if output.logprobs is None else _PIECE_LOGPROBS
    num_tokens = len(output.token_ids)
    if num_first <= 0 and num_tokens <= size:
        yield output
        return
    start = 0
    while True:
        end = min(start + size, num_tokens)
        if start < num_first < end:
            end = num_first
        is_last = end == num_tokens
        yield RequestOutput(
            output.request_id,
            output.first_index + start,
            output.token_ids[start:end],
            output.finish_reason if is_last else None,
            output.stop_token_id if is_last else None,
            None if start else output.num_cached_tokens,
            None if output.logprobs is None else output.logprobs[start:end],
            None if start else output.prompt_logprobs,
        )
        if is_last:
            return
        start = end
