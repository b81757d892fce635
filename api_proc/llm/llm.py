"""The blocking interface: lists of prompts in, lists of results out."""

import functools
import math
import operator
import sys
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from api_proc.llm.async_llm import START_TIMEOUT_S
from api_proc.llm.beams import BeamSearchOutput, BeamSearchParams
from api_proc.llm.engines import Engine, ProcessEngine, SteppedEngine, Stepper
from api_proc.llm.lora import LoRARequests
from api_proc.llm.metrics import Metric
from api_proc.llm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from api_proc.llm.progress_bar import UseTqdm
from api_proc.llm.prompt_lists import Params, PromptLists
from api_proc.llm.prompts import Message, PromptType, invalid, is_one_chat, is_one_prompt
from api_proc.llm.request import PromptRequest
from api_proc.llm.sampling import SamplingParams
from api_proc.llm.settings import engine_config
from api_proc.llm.text_engine import TextEngine
from api_proc.llm.tokenizer import Tokenizer
from api_proc.text.output_sequence import Prompt
from protocol.client.loop_thread import LoopThread
from protocol.sampling import Pooling


class LLM:
    """An engine for programs without an event loop; any thread may use it.

    Its processes outlive the death of one of them, and exit with this program. `close` ends them.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        engine: Stepper | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        **arguments: Any,
    ) -> None:
        """Start an engine and wait until it serves.

        Args:
            model: a model of the Hugging Face hub, a checkpoint directory, "demo", "demo-chat" or
                "null".
            engine: an engine in this process to use instead, as `scripts.inprocess.InprocEngine`;
                `model` and `arguments` are those with which it was created.
            arguments: all settings of `troika serve`, with underscores, and those of vLLM's class.

        ConfigError: an argument cannot be used. EngineStartError: the engine does not start.
        """
        config = engine_config(model, arguments)
        place: Engine = ProcessEngine(config) if engine is None else SteppedEngine(engine)
        self._engine = TextEngine(place, config)
        self._thread = LoopThread("llm")
        self._lists = PromptLists(self._engine, self._thread)
        try:
            self._thread.run(self._engine.start(start_timeout_s), timeout_s=None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the engine within 9 s, and usually at once; open calls fail. Idempotent.

        In a fork of the program it does nothing.
        """
        try:
            self._thread.close(self._engine.disconnect)
        finally:
            self._engine.end()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # At the program's end the processes exit by themselves.
        if hasattr(self, "_thread") and not sys.is_finalizing():
            self.close()

    @property
    def run_dir(self) -> str:
        """The directory of the engine's sockets; RuntimeError for an engine in this process."""
        if not isinstance(self._engine.engine, ProcessEngine):
            raise RuntimeError("an engine in this process has no run directory")
        return self._engine.engine.run_dir

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of generation_config.json and of the settings."""
        return self._engine.default_params()

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer; it can be used until `close`."""
        engine = self._engine
        return Tokenizer(engine.text, engine.facts, lambda work: self._thread.run(work, None))

    def get_metrics(self) -> list[Metric]:
        """Return the numbers of the core, which reports them about once a second."""
        return self._engine.metrics()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = True,
        priority: Sequence[int] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the results are in their order.

        Args:
            sampling_params: for all prompts, or one for each; None: the checkpoint's own.
            use_tqdm: show a progress bar, or the function that makes one.
            priority: one number for each prompt, for the scheduling policy `priority`.
            lora_request: an adapter for all prompts, or one or None for each.

        InvalidRequest: one of the prompts cannot be served, and none has run. PromptsFailed: some
        have failed later.
        """
        return self._lists.complete(
            _prompt_list(prompts),
            self._engine.tokenized,
            sampling_params,
            use_tqdm,
            priority=priority,
            lora_request=lora_request,
        )

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        use_tqdm: UseTqdm = True,
        pooling_params: Pooling | None = None,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of prompts, in their order; errors as `generate`.

        `pooling_params` are by default those with which the checkpoint was trained.
        """
        pooling = pooling_params or self._engine.default_pooling()
        tokenized = self._engine.tokenized_whole
        return self._lists.pool(
            _prompt_list(prompts), tokenized, lambda _: pooling, use_tqdm, lora_request
        )

    def classify(
        self, prompts: PromptType | Sequence[PromptType], *, use_tqdm: UseTqdm = True
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of the labels of prompts, in their order; as `generate`."""
        if self._engine.facts.num_labels == 0:
            raise invalid("model", "it has no classification head")
        pooling = Pooling(self._engine.facts.default_pooling, normalize=False)
        tokenized = self._engine.tokenized_whole
        return [
            ClassificationRequestOutput(
                found.request_id,
                ClassificationOutput(self._engine.activate(found.outputs.embedding)),
                found.prompt_token_ids,
            )
            for found in self._lists.pool(
                _prompt_list(prompts), tokenized, lambda _: pooling, use_tqdm
            )
        ]

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: Pooling | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Return the results of `embed` or `classify`, which `pooling_task` names; as these.

        By default a model with a classification head classifies.
        """
        task = pooling_task or ("classify" if self._engine.facts.num_labels else "embed")
        if task not in ("embed", "classify"):
            raise invalid("pooling_task", f"{task!r} is not supported, only embed and classify are")
        if task == "embed":
            vectors = self.embed(
                prompts,
                use_tqdm=use_tqdm,
                pooling_params=pooling_params,
                lora_request=lora_request,
            )
            return [
                PoolingRequestOutput(
                    found.request_id,
                    PoolingOutput(found.outputs.embedding),
                    found.prompt_token_ids,
                )
                for found in vectors
            ]
        for name, value in (("pooling_params", pooling_params), ("lora_request", lora_request)):
            if value is not None:
                raise invalid(name, "must be None for the task classify")
        return [
            PoolingRequestOutput(
                found.request_id, PoolingOutput(found.outputs.probs), found.prompt_token_ids
            )
            for found in self.classify(prompts, use_tqdm=use_tqdm)
        ]

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *, use_tqdm: UseTqdm = True
    ) -> list[ScoringRequestOutput]:
        """Return how well pairs of texts belong together; one text is paired with all others.

        A classification head with one label scores a pair, an embedding model has the cosine of the
        two vectors. Errors as `generate`.
        """
        first, second = (
            [data] if isinstance(data, str) else list(data) for data in (data_1, data_2)
        )
        if len(first) not in (1, len(second)):
            message = f"has {len(first)} texts, and must have one or the {len(second)} of data_2"
            raise invalid("data_1", message)
        if self._engine.facts.num_labels == 0:
            return self._cosines(first, second, use_tqdm)
        if self._engine.facts.num_labels > 1:
            raise invalid("model", "its classification head has several labels; use `classify`")
        pooling = Pooling(self._engine.facts.default_pooling, normalize=False)
        starts: dict[int, int] = {}

        async def tokenized(pair: tuple[str, str]) -> Prompt:
            prompt, starts[len(starts)] = await self._engine.tokenized_pair(pair)
            return prompt

        def pooling_of(i: int) -> Pooling:
            return msgspec.structs.replace(pooling, second_text_start=starts[i])

        pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
        return [
            ScoringRequestOutput(
                found.request_id,
                ScoringOutput(self._engine.activate(found.outputs.embedding)[0]),
                found.prompt_token_ids,
            )
            for found in self._lists.pool(pairs, tokenized, pooling_of, use_tqdm)
        ]

    def _cosines(
        self, first: list[str], second: list[str], use_tqdm: UseTqdm
    ) -> list[ScoringRequestOutput]:
        pooling = Pooling(self._engine.facts.default_pooling)
        found = self.embed(first + second, use_tqdm=use_tqdm, pooling_params=pooling)
        ones, others = found[: len(first)], found[len(first) :]
        ones = ones * len(others) if len(ones) == 1 else ones
        return [
            ScoringRequestOutput(
                f"{one.request_id}_{other.request_id}",
                ScoringOutput(_product(one.outputs.embedding, other.outputs.embedding)),
                one.prompt_token_ids + other.prompt_token_ids,
            )
            for one, other in zip(ones, others, strict=True)
        ]

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        *,
        use_tqdm: UseTqdm = False,
        lora_request: LoRARequests = None,
    ) -> list[BeamSearchOutput]:
        """Return the best continuations of prompts, in their order; errors as `generate`."""
        self._engine.check_beam_search(params)
        each = SamplingParams(n=params.beam_width, max_tokens=params.max_tokens)

        def request(i: int, prompt: Prompt) -> PromptRequest:
            return PromptRequest(self._engine.new_request_id(), prompt, each, 0)

        search = functools.partial(self._engine.beam_search, params)
        return self._lists.run(
            _prompt_list(prompts),
            self._engine.tokenized,
            request,
            search,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        use_tqdm: UseTqdm = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answer one chat or several, rendered with the checkpoint's template; as `generate`.

        Args:
            continue_final_message: the answer continues the last message of the chat.
            tools: are shown to the model, in OpenAI's form; calls stay a part of the text.
        """
        chats = [messages] if is_one_chat(messages) else messages
        tokenized = functools.partial(
            self._engine.tokenized_chat,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=chat_template_kwargs,
        )
        items = cast(Sequence[Sequence[Message]], chats)
        return self._lists.complete(
            items, tokenized, sampling_params, use_tqdm, lora_request=lora_request
        )


def _prompt_list(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    return [prompts] if is_one_prompt(prompts) else cast(Sequence[PromptType], prompts)


def _product(one: list[float], other: list[float]) -> float:
    return math.fsum(map(operator.mul, one, other))
