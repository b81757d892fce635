"""Runs lists of prompts: a request for each, all of them once all are valid."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from api_proc.llm.lora import LoRARequests, one_each
from api_proc.llm.outputs import EmbeddingRequestOutput, RequestOutput
from api_proc.llm.progress_bar import UseTqdm, progress_bar
from api_proc.llm.prompts import invalid
from api_proc.llm.request import PromptRequest
from api_proc.llm.sampling import SamplingParams
from api_proc.llm.text_engine import Result, TextEngine, at_index
from api_proc.text.output_sequence import Prompt
from protocol.client.errors import RequestFailed
from protocol.client.loop_thread import LoopThread
from protocol.sampling import Pooling

T = TypeVar("T")
Params = SamplingParams | Sequence[SamplingParams] | None


class PromptsFailed(Exception):
    """Some prompts of a list have failed after they were accepted; the others have results."""

    def __init__(self, outputs: list[Any]) -> None:
        failed = [i for i, output in enumerate(outputs) if isinstance(output, RequestFailed)]
        super().__init__(
            f"{len(failed)} of {len(outputs)} prompts have failed; "
            f"prompts[{failed[0]}]: {outputs[failed[0]]}"
        )
        self.outputs = outputs
        """In the order of the prompts: a result, or the failure of this prompt."""


class PromptLists:
    """Runs lists of prompts on one engine; any thread may call it."""

    def __init__(self, engine: TextEngine, thread: LoopThread) -> None:
        """`thread` runs the engine's event loop."""
        self._engine = engine
        self._thread = thread

    def complete(
        self,
        items: Sequence[T],
        tokenized: Callable[[T], Awaitable[Prompt]],
        params: Params,
        use_tqdm: UseTqdm,
        *,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Return the completions of items, with parameters and priorities as `LLM.generate`."""
        num_items = len(items)
        each_params = _params_for_each(
            self._engine.default_params() if params is None else params, num_items
        )
        if priority is not None and len(priority) != num_items:
            raise invalid("priority", f"there are {len(priority)} for {num_items} prompts")

        def request(i: int, prompt: Prompt) -> PromptRequest:
            request_id, seed = self._engine.new_request_id(), self._engine.draw_seed()
            number = 0 if priority is None else priority[i]
            return PromptRequest(request_id, prompt, each_params[i], seed, number)

        return self.run(
            items,
            tokenized,
            request,
            self._engine.finish,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
        )

    def pool(
        self,
        items: Sequence[T],
        tokenized: Callable[[T], Awaitable[Prompt]],
        pooling_of: Callable[[int], Pooling],
        use_tqdm: UseTqdm,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of items; `pooling_of` gets the number of an item."""

        def request(i: int, prompt: Prompt) -> PromptRequest:
            request_id, pooling = self._engine.new_request_id(), pooling_of(i)
            return PromptRequest(request_id, prompt, SamplingParams(), 0, pooling=pooling)

        return self.run(
            items,
            tokenized,
            request,
            self._engine.embed,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
        )

    def run(
        self,
        items: Sequence[T],
        tokenized: Callable[[T], Awaitable[Prompt]],
        make_request: Callable[[int, Prompt], PromptRequest],
        run: Callable[[PromptRequest], Awaitable[Result]],
        *,
        use_tqdm: UseTqdm,
        lora_request: LoRARequests,
    ) -> list[Result]:
        """Make a request of each item, run all of them once all are valid, and wait for the end.

        Args:
            tokenized: returns the prompt of an item.
            make_request: returns the request for the number of an item and its prompt.
            run: returns the result of a request.

        RequestFailed: an item is not valid, and none has run. PromptsFailed: some have failed.
        """
        work = self._all(
            items, tokenized, make_request, run, use_tqdm=use_tqdm, lora_request=lora_request
        )
        outputs = self._thread.run(work, timeout_s=None)
        if any(isinstance(output, RequestFailed) for output in outputs):
            raise PromptsFailed(outputs)
        return cast(list[Result], outputs)

    async def _all(
        self,
        items: Sequence[T],
        tokenized: Callable[[T], Awaitable[Prompt]],
        make_request: Callable[[int, Prompt], PromptRequest],
        run: Callable[[PromptRequest], Awaitable[Result]],
        *,
        use_tqdm: UseTqdm,
        lora_request: LoRARequests,
    ) -> list[Result | RequestFailed]:
        requests, adapters = [], one_each(lora_request, len(items))
        for i, item in enumerate(items):
            try:
                adapter = await self._engine.adapter_of(adapters[i])
                request = make_request(i, await tokenized(item))._replace(adapter=adapter)
                self._engine.check(request)
            except RequestFailed as failure:
                raise at_index(failure, i) from None
            requests.append(request)
            await asyncio.sleep(0)  # other threads may have requests open
        with progress_bar(use_tqdm, len(requests)) as on_end:
            return await self._engine.run_all(requests, run, on_end)


def _params_for_each(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """Return the parameters of each prompt; raises RequestFailed if their numbers differ."""
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise invalid(
            "sampling_params", "must be SamplingParams, or a list with one for each prompt"
        )
    if len(params) != num_prompts:
        raise invalid("sampling_params", f"there are {len(params)} for {num_prompts} prompts")
    return list(params)
