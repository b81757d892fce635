"""Answers of /v1/chat/completions: whole bodies and server-sent events."""

import msgspec

from api_proc import responses
from api_proc.answering import usage_of
from api_proc.bodies import ChatBody
from api_proc.generation import Generation
from api_proc.logprobs import chat_logprobs, prompt_logprobs
from api_proc.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
)
from api_proc.sequence import Delta, OutputSequence, join
from api_proc.state import ApiState


class ChatReply:
    """Renders the answer to one request."""

    prompt_param = "messages"

    def __init__(
        self,
        state: ApiState,
        request_id: str,
        body: ChatBody,
        prompt_token_ids: list[int],
        generation: Generation,
    ) -> None:
        self._tokenizer = state.text.tokenizer
        self._body = body
        self._prompt_token_ids = prompt_token_ids
        self._generation = generation
        self._head = ChatChunk(
            id=f"chatcmpl-{request_id}",
            created=generation.created,
            model=state.model_name,
            choices=[],
        )
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._with_running_usage = bool(options and options.continuous_usage_stats)
        self._begun: set[int] = set()
        self._deltas: dict[int, list[Delta]] = {}
        self._is_plain = not (self._with_running_usage or body.return_token_ids)
        head = responses.encode(self._head)
        assert head.endswith(b"]}")
        self._plain_head = b"data: " + head[:-2] + b'{"index":'
        usage = b',"usage":null' if self._with_usage else b""
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def resume(self, begun: set[int]) -> None:
        """These sequences have begun in an earlier answer."""
        self._begun = begun

    def frames(self, sequence: OutputSequence, delta: Delta) -> list[bytes]:
        """The role before anything else, then one event, or none without text."""
        events = []
        if sequence.index not in self._begun:
            self._begun.add(sequence.index)
            events.append(self._role_frame(sequence))
        if delta.finish_reason is not None or delta.logprobs is not None or not self._is_plain:
            events.append(self._full_frame(sequence, delta))
        elif delta.text:
            text = responses.encode(delta.text)
            pieces = (self._plain_head, sequence.index, text, self._plain_tail)
            events.append(b'%b%d,"delta":{"content":%b%b' % pieces)
        return events

    def usage_frame(self) -> bytes:
        """The event with an empty list of choices."""
        if not self._with_usage:
            return b""
        return responses.frame(self._chunk([], with_usage=True))

    def collect(self, sequence: OutputSequence, delta: Delta) -> None:
        """Keep what is new for the whole answer."""
        self._deltas.setdefault(sequence.index, []).append(delta)

    def body(self) -> bytes:
        """The whole answer."""
        sequences = self._generation.sequences
        completion = ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(s.index, join(self._deltas[s.index])) for s in sequences],
            usage=usage_of(self._generation, 1),
        )
        if self._body.return_token_ids:
            completion.prompt_token_ids = self._prompt_token_ids
        if self._body.prompt_logprobs is not None:
            completion.prompt_logprobs = prompt_logprobs(
                self._tokenizer, sequences[0].prompt_logprobs, self._body.prompt_logprobs
            )
        return responses.encode(completion)

    def _choice(self, index: int, delta: Delta) -> ChatChoice:
        choice = ChatChoice(
            index=index,
            message=AssistantMessage(delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _role_frame(self, sequence: OutputSequence) -> bytes:
        delta = ChatDelta(role="assistant", content="")
        choice = ChatChunkChoice(index=sequence.index, delta=delta)
        chunk = self._chunk([choice], with_usage=self._with_running_usage)
        if self._body.return_token_ids:
            chunk.prompt_token_ids = self._prompt_token_ids
        return responses.frame(chunk)

    def _full_frame(self, sequence: OutputSequence, delta: Delta) -> bytes:
        choice = ChatChunkChoice(
            index=sequence.index,
            delta=ChatDelta(content=delta.text or None),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
        )
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        return responses.frame(self._chunk([choice], with_usage=self._with_running_usage))

    def _chunk(self, choices: list[ChatChunkChoice], *, with_usage: bool) -> ChatChunk:
        usage: responses.Usage | msgspec.UnsetType | None = msgspec.UNSET
        if with_usage:
            usage = usage_of(self._generation, 1)
        elif self._with_usage:
            usage = None
        return msgspec.structs.replace(self._head, choices=choices, usage=usage)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if not self._body.logprobs or delta.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, delta.logprobs, self._body.top_logprobs or 0)
