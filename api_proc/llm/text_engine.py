"""Text over an engine: what the blocking and the asynchronous interface have in common."""

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from api_proc.errors import ApiError
from api_proc.llm.beams import BeamSearchOutput, BeamSearchParams, sequence_of
from api_proc.llm.engines import Engine
from api_proc.llm.lora import KnownAdapters, LoRARequest
from api_proc.llm.metrics import Metric, metrics_of
from api_proc.llm.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from api_proc.llm.prompts import (
    Message,
    PromptType,
    from_api_error,
    invalid,
    tokenized,
    tokenized_chat,
    tokenized_pair,
)
from api_proc.llm.request import PromptRequest, Request
from api_proc.llm.sampling import RequestOutputKind, SamplingParams, resolved, with_defaults
from api_proc.text.beam_search import beam_search
from api_proc.text.embedding_config import embedding_config
from api_proc.text.label_config import label_config
from api_proc.text.output_sequence import Prompt
from api_proc.text.processor import TextProcessor
from api_proc.text.thinking import thinking_budget
from protocol import sampling
from protocol.adapters import Adapter
from protocol.api_core import AddRequest, ErrorCode, RequestError
from protocol.client.errors import Overloaded, RequestFailed, failure_of
from protocol.client.ledger import check_request
from protocol.client.request_stream import RequestStream
from protocol.config import EngineConfig, ModelConfig
from protocol.message import unpack_floats
from protocol.model_facts import ModelFacts

Result = TypeVar("Result")


class TextEngine:
    """Tokenizer, seeds and open requests; all methods but `end` are called in one event loop."""

    def __init__(self, engine: Engine, config: EngineConfig) -> None:
        """`config` is that of the engine; its seed is the base of all seeds, even if it is 0."""
        self.engine = engine
        self._config = config
        self._random = random.Random(config.model.seed)
        self._numbers = itertools.count()
        self._open: dict[str, Request] = {}
        self._adapters = KnownAdapters()
        self._text: TextProcessor | None = None
        self._facts: ModelFacts | None = None

    async def start(self, timeout_s: float) -> None:
        """Wait until requests are served; EngineStartError or ConfigError: they never will be."""
        self._facts = await self.engine.start(timeout_s)
        self._text = await asyncio.to_thread(TextProcessor.load, self._model)

    async def disconnect(self) -> None:
        """Fail everything that is open."""
        await self.engine.disconnect()
        if self._text is not None:
            self._text.close()

    def end(self) -> None:
        self.engine.end()

    @property
    def text(self) -> TextProcessor:
        assert self._text is not None, "not started"
        return self._text

    @property
    def facts(self) -> ModelFacts:
        assert self._facts is not None, "not started"
        return self._facts

    def default_params(self) -> SamplingParams:
        return with_defaults(self.text.defaults)

    def metrics(self) -> list[Metric]:
        return metrics_of(self.engine.stats(), self._config.model.shown_model)

    def new_request_id(self) -> str:
        """Return a number that no open request has."""
        return next(name for name in map(str, self._numbers) if name not in self._open)

    def draw_seed(self) -> int:
        return self._random.getrandbits(63)

    async def tokenized(self, prompt: PromptType) -> Prompt:
        return await tokenized(self.text, prompt, self.facts.max_model_len - 1)

    async def tokenized_whole(self, prompt: PromptType) -> Prompt:
        """Return a prompt that no output follows."""
        return await tokenized(self.text, prompt, self.facts.max_model_len, num_outputs=0)

    async def tokenized_pair(self, pair: tuple[str, str]) -> tuple[Prompt, int]:
        """Return the prompt of two texts, and `second_text_start` of its pooling."""
        if label_config(self._model).has_separator:
            return await tokenized_pair(self.text, pair, self.facts.max_model_len)
        return await self.tokenized_whole("".join(pair)), 0

    def activate(self, scores: list[float]) -> list[float]:
        """Return the results of a classification head's numbers."""
        return label_config(self._model).activate(scores)

    @property
    def _model(self) -> ModelConfig:
        # The worker knows the directory of a model that is named otherwise.
        return msgspec.structs.replace(self._config.model, model=self.facts.model)

    async def tokenized_chat(self, messages: Sequence[Message], **options: Any) -> Prompt:
        return await tokenized_chat(self.text, messages, self.facts.max_model_len - 1, **options)

    async def adapter_of(self, request: LoRARequest | None) -> Adapter | None:
        """Return the adapter of a request; RequestFailed: it cannot be used."""
        if request is None:
            return None
        if not self._config.lora.enable_lora:
            raise invalid("lora_request", "the engine was started without enable_lora")
        return await asyncio.to_thread(self._adapters.of, request)

    def check(self, request: PromptRequest) -> None:
        """Raise RequestFailed for a request that the model cannot serve."""
        params = self._params(request, 0)
        add = AddRequest(
            0,
            request.prompt.token_ids,
            params,
            priority=request.priority,
            adapter=request.adapter,
        )
        check_request(add, self.facts)

    def submit(self, request: PromptRequest) -> Request:
        """Submit all sequences of a request; RequestFailed: there is no room for it, or as `check`.

        It is open until its outputs have been read by `outputs`.
        """
        if request.request_id in self._open:
            raise invalid("request_id", f"{request.request_id!r} is the id of an open request")
        streams: list[RequestStream] = []
        try:
            for i in range(request.params.n):
                streams.append(self._submit_one(request, i))
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        opened = self._open[request.request_id] = Request(request, streams, self.text.tokenizer)
        return opened

    def _submit_one(self, request: PromptRequest, index: int) -> RequestStream:
        prompt, params = request.prompt.token_ids, self._params(request, index)
        return self.engine.submit(
            prompt, params, priority=request.priority, adapter=request.adapter
        )

    def _params(self, request: PromptRequest, index: int) -> sampling.SamplingParams:
        if request.pooling is not None:
            return sampling.pooling_params(request.pooling)
        params, token_ids = request.params, request.prompt.token_ids
        try:
            budget = thinking_budget(self.text, token_ids, params.thinking_token_budget)
        except ApiError as error:
            raise from_api_error(error) from None
        return resolved(
            params,
            self.facts,
            self.text.tokenizer,
            len(token_ids),
            defaults=self.text.defaults,
            seed=request.seed,
            index=index,
            budget=budget,
        )

    async def outputs(
        self, request: PromptRequest, kind: RequestOutputKind
    ) -> AsyncGenerator[RequestOutput, None]:
        """Submit a request and iterate over its outputs; leaving early aborts it."""
        opened = self.submit(request)
        try:
            async with aclosing(opened.outputs(kind)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            del self._open[request.request_id]

    def abort(self, request_id: str) -> None:
        """End a request with the reason abort, if it is open."""
        opened = self._open.get(request_id)
        if opened is not None:
            opened.abort()

    async def finish(self, request: PromptRequest) -> RequestOutput:
        """Return the last output of a request."""
        async with aclosing(self.outputs(request, RequestOutputKind.FINAL_ONLY)) as outputs:
            return [output async for output in outputs][-1]

    async def embed(self, request: PromptRequest) -> EmbeddingRequestOutput:
        """Return the vector of a prompt; RequestFailed: the request has failed."""
        stream = self._submit_one(request, 0)
        try:
            async for output in stream:
                if output.embedding is not None:
                    embedding = EmbeddingOutput(unpack_floats(output.embedding).tolist())
                    token_ids = request.prompt.token_ids
                    return EmbeddingRequestOutput(request.request_id, embedding, token_ids)
        finally:
            stream.cancel()
        text = "the request has ended without its vector"
        raise failure_of(RequestError(ErrorCode.INTERNAL, text))

    def check_beam_search(self, params: BeamSearchParams) -> None:
        """Raise InvalidRequest for a search that the checkpoint does not permit."""
        params.check(self._suppressed)

    @property
    def _suppressed(self) -> list[int]:
        return self.text.defaults.suppressed(self.facts.vocab_size, None)

    async def beam_search(
        self, params: BeamSearchParams, request: PromptRequest
    ) -> BeamSearchOutput:
        """Return the best continuations of a prompt; RequestFailed: one of the steps has failed."""

        def submit(token_ids: list[int], step_params: sampling.SamplingParams) -> RequestStream:
            token_ids = prompt.token_ids + token_ids
            return self.engine.submit(
                token_ids, step_params, priority=request.priority, adapter=request.adapter
            )

        prompt, tokenizer = request.prompt, self.text.tokenizer
        options = params.options(self.facts, len(prompt.token_ids), self._suppressed)
        found = await beam_search(submit, options)
        return BeamSearchOutput([sequence_of(beam, prompt, tokenizer) for beam in found.beams])

    def default_pooling(self) -> sampling.Pooling:
        """Return how the checkpoint was trained to embed."""
        if self.facts.num_labels:
            raise invalid("model", "it returns scores of labels, and no vectors")
        config = embedding_config(self._model)
        return sampling.Pooling(self.facts.default_pooling, normalize=config.modules.normalize)

    async def run_all(
        self,
        requests: Sequence[PromptRequest],
        run: Callable[[PromptRequest], Awaitable[Result]],
        on_end: Callable[[Result], None],
    ) -> list[Result | RequestFailed]:
        """Run requests to their ends and return these in the order of the requests.

        About twice as many sequences as the engine computes at a time are open. A request for which
        there is no room is run again, for as long as requests wait for an engine.
        """
        results: list[Result | RequestFailed | None] = [None] * len(requests)
        waiting = iter(range(len(requests)))

        async def work() -> None:
            for i in waiting:
                try:
                    result = await self._when_there_is_room(run, requests[i])
                    results[i] = result
                    on_end(result)
                except RequestFailed as failure:
                    results[i] = failure

        largest = max((request.params.n for request in requests), default=1)
        num_open = max(1, 2 * self._config.scheduler.max_num_seqs // largest)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(num_open, len(requests))):
                group.create_task(work())
        return [result for result in results if result is not None]

    async def _when_there_is_room(
        self, run: Callable[[PromptRequest], Awaitable[Result]], request: PromptRequest
    ) -> Result:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._config.recovery.stall_timeout_s
        while True:
            try:
                return await run(request)
            except Overloaded as failure:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(failure.retry_after_s)


def at_index(failure: RequestFailed, index: int) -> RequestFailed:
    """Name the prompt of a list in its failure."""
    error = failure.error
    message = f"prompts[{index}]: {error.message}"
    return type(failure)(msgspec.structs.replace(error, message=message))
