"""The checkpoint's own sampling parameters in the Python interface."""

from pathlib import Path
from typing import Any, Unpack

import msgspec
import pytest

from api_proc.llm import LLM, SamplingParams
from api_proc.llm.settings import engine_config
from protocol import sampling
from protocol.api_core import EngineStats, RequestOutput
from protocol.client.ledger import RequestOptions
from protocol.config import ConfigError
from protocol.sampling import FinishReason
from tests.api.fake_engine import FACTS


class OneTokenEngine:
    """Ends every request after one token, and records its parameters."""

    def __init__(self, checkpoint: Path) -> None:
        self.facts = msgspec.structs.replace(FACTS, model=str(checkpoint))
        self.params: list[sampling.SamplingParams] = []
        self._open: list[int] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._open)

    def submit(
        self,
        prompt_token_ids: list[int],
        params: sampling.SamplingParams,
        **options: Unpack[RequestOptions],
    ) -> int:
        self.params.append(params)
        self._open.append(len(self.params))
        return self._open[-1]

    def cancel(self, request_id: int) -> None:
        self._open.remove(request_id)

    def step(self) -> list[RequestOutput]:
        ended, self._open = self._open, []
        return [RequestOutput(request_id, 0, [5], FinishReason.LENGTH) for request_id in ended]

    def stats(self) -> EngineStats:
        return EngineStats()


def test_arguments_of_vllm_that_change_no_output_are_accepted() -> None:
    """The kind of a model, whether texts or vectors, follows from its files."""
    arguments: dict[str, Any] = {
        "runner": "pooling",
        "convert": "embed",
        "task": "embed",
        "distributed_executor_backend": "mp",
        "compilation_config": {"level": 3},
        "limit_mm_per_prompt": {"image": 0},
        "hf_overrides": None,
    }
    assert engine_config("demo", arguments) == engine_config("demo", {})
    for name, value in (("runner", "draft"), ("task", "reward"), ("cpu_offload_gb", 2)):
        with pytest.raises(ConfigError, match=f"^{name}: {value!r} is not supported, only "):
            engine_config("demo", {name: value})


def test_the_checkpoints_own_parameters_are_shown_and_apply_to_prompts_without_any(
    checkpoint: Path,
) -> None:
    engine = OneTokenEngine(checkpoint)
    with LLM(str(checkpoint), engine=engine) as llm:
        shown = llm.get_default_sampling_params()
        assert shown == SamplingParams(temperature=0.25, top_k=7)
        llm.generate("Hello", use_tqdm=False)
        shown.max_tokens = 1
        assert llm.get_default_sampling_params().max_tokens == 16, "each call returns new ones"
        llm.generate(["Hello", "Hello"], shown, use_tqdm=False)
        llm.generate("Hello", SamplingParams(), use_tqdm=False)
    assert [each.max_tokens for each in engine.params] == [16, 1, 1, 16]
    assert [each.temperature for each in engine.params] == [0.25, 0.25, 0.25, 1.0]
    assert [each.top_k for each in engine.params] == [7, 7, 7, 0]
