"""The asynchronous interface: one stream of outputs per request."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from api_proc.llm.engines import ProcessEngine
from api_proc.llm.lora import LoRARequest
from api_proc.llm.outputs import EmbeddingRequestOutput, RequestOutput
from api_proc.llm.prompts import PromptType, invalid
from api_proc.llm.request import PromptRequest
from api_proc.llm.sampling import SamplingParams
from api_proc.llm.settings import engine_config
from api_proc.llm.text_engine import TextEngine
from protocol.config import EngineConfig
from protocol.sampling import Pooling

START_TIMEOUT_S = 600.0


class AsyncLLM:
    """An engine in its own processes, for one event loop.

    async with AsyncLLM("demo") as llm:
        async for output in llm.generate("def add(a, b):", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)
    """

    def __init__(self, model: str, **arguments: Any) -> None:
        """Take the arguments of `LLM`; nothing starts yet. ConfigError: one cannot be used."""
        config: EngineConfig = engine_config(model, arguments)
        self._processes = ProcessEngine(config)
        self._engine = TextEngine(self._processes, config)

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the processes and wait until they serve; EngineStartError: they do not."""
        try:
            await self._engine.start(timeout_s)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the processes within 5 s; open requests fail with `RequestFailed`. Idempotent."""
        try:
            await self._engine.disconnect()
        finally:
            await asyncio.shield(asyncio.to_thread(self._engine.end))

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def run_dir(self) -> str:
        """The directory of the engine's sockets."""
        return self._processes.run_dir

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of generation_config.json and of the settings."""
        return self._engine.default_params()

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Iterate over the outputs of one prompt, as `sampling_params.output_kind` asks.

        The request is aborted when the iteration is left or its task is cancelled. RequestFailed:
        it is invalid, there is no room for it, or it has failed.
        """
        engine = self._engine
        params = engine.default_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise invalid("sampling_params", "must be SamplingParams")
        name = engine.new_request_id() if request_id is None else request_id
        tokens = await engine.tokenized(prompt)
        adapter = await engine.adapter_of(lora_request)
        request = PromptRequest(name, tokens, params, engine.draw_seed(), priority, adapter=adapter)
        async with aclosing(engine.outputs(request, params.output_kind)) as outputs:
            async for output in outputs:
                yield output

    async def embed(
        self,
        prompt: PromptType,
        pooling_params: Pooling | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> EmbeddingRequestOutput:
        """Return the vector of one prompt; it is aborted when the task is cancelled.

        `pooling_params` are by default those with which the checkpoint was trained. RequestFailed:
        as `generate`.
        """
        engine = self._engine
        pooling = pooling_params or engine.default_pooling()
        tokens = await engine.tokenized_whole(prompt)
        name = engine.new_request_id()
        adapter = await engine.adapter_of(lora_request)
        request = PromptRequest(name, tokens, SamplingParams(), 0, priority, pooling, adapter)
        return await engine.embed(request)

    async def check_health(self) -> None:
        """Raise EngineFailed if the engine's processes have ended, which needs another AsyncLLM.

        The replacement of a dead worker or core is not a failure.
        """
        self._processes.check()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests with the finish reason abort; ids that are not open are ignored."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            self._engine.abort(name)
