"""The Python interface: arguments, parameters, prompts and engines that are refused or fail."""

from typing import Any

import pytest

from api_proc.llm import LLM, BeamSearchParams, PromptsFailed, SamplingParams
from protocol.api_core import ErrorCode, RequestError
from protocol.client.errors import InvalidRequest, Overloaded, RequestQuarantined, failure_of
from protocol.config import ConfigError
from protocol.config.settings import configure
from protocol.process.failpoints import POISON_TOKEN_ID, VARIABLE
from protocol.process.launch import EngineStartError
from scripts.inprocess import InprocEngine
from tests.system.embedding.generation import GREEDY, PROMPTS, SETTINGS, Bar, expected, token_ids


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 11}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"length_penalty": 11.0}, "length_penalty"),
        ({"temperature": 0.5}, "temperature"),
    ],
)
def test_bounds_of_beam_search_are_named(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 5} | fields))


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        ([[1], [40_000]], r"prompts\[1\]: token id 40000 is outside the vocabulary of 32000"),
        ([[1], []], r"prompts\[1\]: prompt must hold at least one token"),
        ([[1] * 9000], r"prompts\[0\]: prompt has 9000 tokens; the model's context of 8192"),
        (["x" * 9000], r"prompts\[0\]: prompt: the prompt has at least 9000 tokens"),
        ([{"prompt": "x", "multi_modal_data": 1}], "'multi_modal_data' is not supported"),
        ([{}], "a prompt is a text, a list of token ids"),
        ([None], "a prompt is a text, a list of token ids"),
        ([["x"]], "must be an integer, got a string"),
        (5, "must be a prompt or a list of prompts"),
    ],
)
def test_bad_prompt_is_named_before_any_runs(llm: LLM, prompts: Any, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        llm.generate(prompts, use_tqdm=False)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temperature": 3.0}, r"temperature: must be a number <= 2\.0, got 3\.0"),
        ({"n": 0}, "n: must be an integer >= 1, got 0"),
        ({"logprobs": 21}, "logprobs: must be an integer <= 20, got 21"),
        ({"stop": [""]}, r"stop\[0\]: must be a string of length >= 1"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens: 3 is greater than max_tokens 2"),
        ({"stop": "x", "detokenize": False}, "stop: stop strings need detokenize"),
        ({"logit_bias": {5: 200.0}}, "logit_bias: a value in it must be a number <= 100.0"),
    ],
)
def test_bad_parameter_is_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"quantization": "awq"}, "quantization: .*'awq'"),
        (
            {"load_format": "gguf"},
            "load_format: 'gguf' is not supported, only 'auto' or 'safetensors' are",
        ),
        ({"task": "reward"}, "task: 'reward' is not supported, only 'auto' or 'generate' or"),
        ({"hf_overrides": {"rope": 1}}, "hf_overrides: .* is not supported, only None is"),
        ({"max_num_sequences": 4}, "unknown setting max_num_sequences .* max_num_seqs"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be an integer >= 1"),
        ({"dtype": "int4"}, "dtype"),
    ],
)
def test_bad_argument_is_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM("null", **arguments)


def test_engine_that_cannot_start_is_an_error_at_once() -> None:
    with pytest.raises(EngineStartError, match=r"model /nowhere "):
        LLM("/nowhere", log_level="error")


def test_ranks_that_cannot_divide_the_model_are_refused_before_they_start(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The program gets the reason as an error, and its standard error stays empty."""
    reason = "tensor_parallel_size 64 cannot divide the model: .+ states 8 attention heads"
    with pytest.raises(EngineStartError, match=f"^{reason}$"):
        LLM("demo", tensor_parallel_size=64, start_timeout_s=10)
    assert capfd.readouterr() == ("", "")


def test_exception_in_the_bar_leaves_nothing_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(bar: Bar, number: int) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Bar, "update", fail)
    with pytest.raises(ExceptionGroup):
        llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    assert not llm._engine._open


class Refusing(InprocEngine):
    """Refuses one prompt for good, and every second prompt for once."""

    num_refused = 0

    def submit(self, prompt_token_ids: list[int], *args: Any, **options: Any) -> int:
        if prompt_token_ids == PROMPTS[1]:
            raise failure_of(RequestError(ErrorCode.QUARANTINED, "it kills workers"))
        if prompt_token_ids[-1] % 2 and self.num_refused < 3:
            self.num_refused += 1
            failure = failure_of(RequestError(ErrorCode.OVERLOADED, "there is no room"))
            assert isinstance(failure, Overloaded)
            failure.retry_after_s = 0.01
            raise failure
        return super().submit(prompt_token_ids, *args, **options)


def test_prompt_that_fails_spares_the_others_and_a_full_queue_is_waited_for() -> None:
    engine = Refusing(configure(model="null"))
    with (
        LLM(engine=engine) as llm,
        pytest.raises(PromptsFailed, match=r"1 of 20 prompts have failed; prompts\[1\]") as info,
    ):
        llm.generate(PROMPTS[:20], GREEDY, use_tqdm=False)
    assert engine.num_refused == 3
    outputs = info.value.outputs
    assert isinstance(outputs.pop(1), RequestQuarantined)
    assert token_ids(outputs) == expected([PROMPTS[0], *PROMPTS[2:20]], GREEDY)


@pytest.mark.slow
def test_poisonous_prompt_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "worker.poison=segv@*")
    with LLM("null", **SETTINGS) as llm:
        monkeypatch.undo()
        prompts = [PROMPTS[0], [POISON_TOKEN_ID, 1], *PROMPTS[1:20]]
        with pytest.raises(PromptsFailed) as info:
            llm.generate(prompts, GREEDY, use_tqdm=False)
    [good, poison, *others] = info.value.outputs
    assert isinstance(poison, RequestQuarantined)
    assert token_ids([good, *others]) == expected(PROMPTS[:20], GREEDY)
