"""Answers of /v1/completions: whole bodies and server-sent events."""

import msgspec

from api_proc import responses
from api_proc.answering import usage_of
from api_proc.bodies import CompletionBody
from api_proc.generation import Generation
from api_proc.logprobs import completion_logprobs, prompt_logprobs, prompt_offsets
from api_proc.responses import Completion, CompletionChoice, CompletionLogprobs
from api_proc.sequence import Delta, OutputSequence, Prompt, join
from api_proc.state import ApiState
from protocol.core_worker import TokenLogprobs


class CompletionReply:
    """Renders the answer to one request."""

    prompt_param = "prompt"

    def __init__(
        self,
        state: ApiState,
        request_id: str,
        body: CompletionBody,
        prompts: list[Prompt],
        generation: Generation,
    ) -> None:
        self._tokenizer = state.text.tokenizer
        self._body = body
        self._prompts = prompts
        self._generation = generation
        self._head = Completion(
            id=f"cmpl-{request_id}", created=generation.created, model=state.model_name, choices=[]
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
        self._plain_tail = (
            b',"logprobs":null,"finish_reason":null,"stop_reason":null}]' + usage + b"}\n\n"
        )

    def resume(self, begun: set[int]) -> None:
        """These sequences have begun in an earlier answer."""
        self._begun = begun

    def frames(self, sequence: OutputSequence, delta: Delta) -> list[bytes]:
        """One event, or none where the tokens make no text yet."""
        is_first = sequence.index not in self._begun
        if is_first:
            self._begun.add(sequence.index)
        needs_more = delta.finish_reason is not None or delta.logprobs is not None
        if needs_more or not self._is_plain or (is_first and self._body.echo):
            return [self._full_frame(sequence, delta, is_first=is_first)]
        if not delta.text:
            return []
        text = responses.encode(delta.text)
        return [b'%b%d,"text":%b%b' % (self._plain_head, sequence.index, text, self._plain_tail)]

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
        choices = [
            self._choice(sequence, join(self._deltas[sequence.index]), is_first=True)
            for sequence in self._generation.sequences
        ]
        return responses.encode(self._chunk(choices, with_usage=True))

    def _full_frame(self, sequence: OutputSequence, delta: Delta, *, is_first: bool) -> bytes:
        choice = self._choice(sequence, delta, is_first=is_first)
        return responses.frame(self._chunk([choice], with_usage=self._with_running_usage))

    def _chunk(self, choices: list[CompletionChoice], *, with_usage: bool) -> Completion:
        usage: responses.Usage | msgspec.UnsetType | None = msgspec.UNSET
        if with_usage:
            usage = usage_of(self._generation, len(self._prompts))
        elif self._with_usage:
            usage = None
        return msgspec.structs.replace(self._head, choices=choices, usage=usage)

    def _choice(
        self, sequence: OutputSequence, delta: Delta, *, is_first: bool
    ) -> CompletionChoice:
        prompt = self._prompts[sequence.index // (self._body.n or 1)]
        echoed = self._echoed(prompt) if is_first and self._body.echo else ""
        choice = CompletionChoice(
            index=sequence.index,
            text=echoed + delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if self._body.logprobs is not None:
            choice.logprobs = self._logprobs(sequence, delta, prompt, is_first=is_first)
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
            if is_first:
                choice.prompt_token_ids = prompt.token_ids
        if self._body.prompt_logprobs is not None and is_first:
            choice.prompt_logprobs = prompt_logprobs(
                self._tokenizer, sequence.prompt_logprobs, self._body.prompt_logprobs
            )
        return choice

    def _logprobs(
        self, sequence: OutputSequence, delta: Delta, prompt: Prompt, *, is_first: bool
    ) -> CompletionLogprobs:
        """Those of the output, after those of an echoed prompt."""
        token_ids = delta.token_ids
        entries: list[TokenLogprobs | None] = list(delta.logprobs or [])
        offsets = delta.text_offsets
        if self._body.echo:
            num_echoed = len(self._echoed(prompt))
            offsets = [num_echoed + offset for offset in offsets]
        if self._body.echo and is_first:
            token_ids = prompt.token_ids + token_ids
            known = sequence.prompt_logprobs or [None]
            assert len(known) == len(prompt.token_ids), "prompt logprobs are incomplete"
            entries = known + entries
            offsets = prompt_offsets(self._tokenizer, prompt.token_ids) + offsets
        num_top = self._body.logprobs or 0
        return completion_logprobs(self._tokenizer, token_ids, entries, offsets, num_top)

    def _echoed(self, prompt: Prompt) -> str:
        if prompt.text is not None and self._body.truncate_prompt_tokens is None:
            return prompt.text
        skip = self._body.skip_special_tokens is not False
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=skip)
