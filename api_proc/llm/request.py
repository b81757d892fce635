"""One request while it is generated: its sequences, and what they have produced so far."""

import asyncio
from collections.abc import AsyncGenerator
from typing import NamedTuple

from api_proc.llm.outputs import CompletionOutput, Logprob, RequestOutput, candidates
from api_proc.llm.sampling import RequestOutputKind, SamplingParams
from api_proc.text.output_sequence import OutputSequence, Prompt, StopStrings
from api_proc.text.tokenizer import TextTokenizer
from protocol.adapters import Adapter
from protocol.api_core import ErrorCode, RequestError
from protocol.client.errors import failure_of
from protocol.client.request_stream import RequestStream
from protocol.sampling import FinishReason, Pooling


class PromptRequest(NamedTuple):
    """A request that was not submitted yet."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    seed: int
    """Used where `params` has none."""
    priority: int = 0
    pooling: Pooling | None = None
    """How the prompt becomes a vector; `params` is then ignored."""
    adapter: Adapter | None = None


class _Sequence:
    """The text, tokens and logprobs of one sequence."""

    def __init__(
        self, index: int, request: PromptRequest, stream: RequestStream, tokenizer: TextTokenizer
    ) -> None:
        params, prompt_token_ids = request.params, request.prompt.token_ids
        self._tokenizer = tokenizer
        self._has_text = params.detokenize
        self.state = OutputSequence(
            index,
            stream,
            tokenizer.detokenizer(prompt_token_ids, skip_special_tokens=params.skip_special_tokens),
            num_prompt_tokens=len(prompt_token_ids),
            stop=StopStrings(
                params.stop_strings, params.include_stop_str_in_output, params.min_tokens
            ),
        )
        self.finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None
        self._cumulative_logprob = 0.0
        if params.logprobs is not None:
            self._logprobs = []

    async def read(self, changed: asyncio.Event | None) -> None:
        """Take all outputs and set `changed` after each; RequestFailed: the request has failed."""
        async for output in self.state.stream:
            delta = self.state.push(output)
            if self._has_text:
                self._text.append(delta.text)
            self._token_ids += delta.token_ids
            if self._logprobs is not None:
                for entry in delta.logprobs or []:
                    self._logprobs.append(candidates(self._tokenizer, entry))
                    self._cumulative_logprob += entry.logprob
            if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                text = f"the engine ended the request: {delta.finish_reason}"
                raise failure_of(RequestError(ErrorCode.INTERNAL, text))
            self.finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason
            if changed is not None:
                changed.set()
            if self.finish_reason is not None:
                return
        self.finish_reason = FinishReason.ABORT.value

    def take(self, *, is_delta: bool) -> CompletionOutput:
        """Return everything so far, or for a delta what is new since the last call."""
        logprobs = self._logprobs
        output = CompletionOutput(
            self.state.index,
            "".join(self._text),
            list(self._token_ids),
            None if logprobs is None else self._cumulative_logprob,
            None if logprobs is None else list(logprobs),
            self.finish_reason,
            self._stop_reason,
        )
        if is_delta:
            self._text, self._token_ids = [], []
            self._logprobs = None if logprobs is None else []
        else:
            self._text = [output.text]
        return output


class Request:
    """One request that was submitted, with all of its sequences."""

    def __init__(
        self, request: PromptRequest, streams: list[RequestStream], tokenizer: TextTokenizer
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._sequences = [
            _Sequence(i, request, stream, tokenizer) for i, stream in enumerate(streams)
        ]
        self._prompt_logprobs: list[dict[int, Logprob] | None] = []

    def abort(self) -> None:
        """End all sequences with the reason abort."""
        for sequence in self._sequences:
            if sequence.finish_reason is None:
                sequence.state.stream.cancel()

    async def outputs(self, kind: RequestOutputKind) -> AsyncGenerator[RequestOutput, None]:
        """Iterate until the end, which the last output contains; leaving early aborts.

        RequestFailed: the request has failed.
        """
        changed = asyncio.Event()
        on_output = None if kind is RequestOutputKind.FINAL_ONLY else changed
        readers = [asyncio.create_task(item.read(on_output)) for item in self._sequences]
        for reader in readers:
            reader.add_done_callback(lambda _: changed.set())
        try:
            while not _are_done(readers):
                await changed.wait()
                changed.clear()
                if on_output is not None and not self._is_finished:
                    yield self._output(kind)
            yield self._output(kind)
        finally:
            self.abort()
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    @property
    def _is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self._sequences)

    def _output(self, kind: RequestOutputKind) -> RequestOutput:
        first = self._sequences[0].state
        prompt_logprobs = None
        if self._request.params.prompt_logprobs is not None:
            new = first.prompt_logprobs[len(self._prompt_logprobs) :]
            self._prompt_logprobs += [
                None if entry is None else candidates(self._tokenizer, entry) for entry in new
            ]
            prompt_logprobs = list(self._prompt_logprobs)
        is_delta = kind is RequestOutputKind.DELTA
        return RequestOutput(
            self._request.request_id,
            self._request.prompt.text,
            self._request.prompt.token_ids,
            prompt_logprobs,
            [sequence.take(is_delta=is_delta) for sequence in self._sequences],
            self._is_finished,
            first.num_cached_tokens,
        )


def _are_done(readers: list[asyncio.Task[None]]) -> bool:
    """Return whether all readers have ended; raises what one of them has raised."""
    num_done = 0
    for reader in readers:
        if reader.done():
            reader.result()
            num_done += 1
    return num_done == len(readers)
