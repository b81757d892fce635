"""The Python interface: results, order, bounds, deaths of processes, and what the host keeps."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from api_proc.llm import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    Pooling,
    PoolingType,
    PromptsFailed,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from api_proc.llm.metrics import Counter, Gauge
from api_proc.llm.sampling import resolved
from api_proc.llm.settings import engine_config
from api_proc.text.tokenizer import FIRST_BYTE_ID, ByteTokenizer
from protocol.api_core import ErrorCode, RequestError
from protocol.client.errors import (
    InvalidRequest,
    Overloaded,
    RequestFailed,
    RequestQuarantined,
    failure_of,
)
from protocol.config import ConfigError, Dtype
from protocol.config.settings import configure
from protocol.lifecycle import Role
from protocol.process.failpoints import POISON_TOKEN_ID, VARIABLE
from protocol.process.launch import EngineStartError
from scripts.inprocess import InprocEngine
from scripts.testing import RunningEngine, eventually
from tests.system import host_state
from tests.system.conftest import ROOT
from worker_proc.startup.start import null_facts

PAGE = ROOT / "docs" / "python.md"
PROMPTS = [[5, 6, 7, n] for n in range(100)]
GREEDY = SamplingParams(temperature=0, max_tokens=80)
SETTINGS: dict[str, Any] = {"null_step_ms": 1.0, "max_num_seqs": 16, "log_level": "error"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("null", **SETTINGS) as started:
        yield started


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def expected(prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Return the tokens of the engine in one process."""
    llm = LLM(engine=InprocEngine(configure(model="null")))
    try:
        return token_ids(llm.generate(prompts, params, use_tqdm=False))
    finally:
        llm.close()


def test_replicas_compute_what_one_engine_computes() -> None:
    with LLM("null", data_parallel_size=2, **SETTINGS) as llm:
        found = token_ids(llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False))
    assert found == expected(PROMPTS[:8], GREEDY)


class Bar:
    """Counts as tqdm does."""

    def __init__(self, **options: Any) -> None:
        self.total = options["total"]
        self.count = 0
        self.is_closed = False
        self.format_dict = {"elapsed": 1.0}

    def update(self, number: int) -> None:
        self.count += number

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text

    def close(self) -> None:
        self.is_closed = True


def test_results_have_the_shape_of_vllms(llm: LLM) -> None:
    params = SamplingParams(n=2, max_tokens=5, logprobs=2, prompt_logprobs=1, seed=3)
    [output] = llm.generate("hello", params, use_tqdm=False)
    assert (output.prompt, output.finished) == ("hello", True)
    assert len(output.prompt_token_ids) == 5
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token_id, entry in zip(
        output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
    ):
        assert entry is not None
        assert token_id in entry
    assert [item.index for item in output.outputs] == [0, 1]
    for item in output.outputs:
        assert (item.finish_reason, item.stop_reason, item.finished()) == ("length", None, True)
        assert len(item.token_ids) == 5
        assert item.text == "".join(f"<{token_id}>" for token_id in item.token_ids)
        assert item.logprobs is not None
        sampled = [row[i] for row, i in zip(item.logprobs, item.token_ids, strict=True)]
        assert item.cumulative_logprob == sum(logprob.logprob for logprob in sampled)
        assert sampled[0].decoded_token == f"<{item.token_ids[0]}>"


def test_prompts_have_four_forms(llm: LLM) -> None:
    ids = llm.generate("hi", GREEDY, use_tqdm=False)[0].prompt_token_ids
    forms: list[Any] = ["hi", ids, {"prompt": "hi"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(tokens) for tokens in token_ids(outputs)}) == 1
    assert [output.prompt for output in outputs] == ["hi", None, "hi", None]
    assert token_ids(llm.generate(ids, GREEDY, use_tqdm=False)) == token_ids(outputs[:1])
    assert llm.generate([], GREEDY) == []


def test_results_are_in_the_order_of_the_prompts_however_long_they_take(llm: LLM) -> None:
    """At most twice as many requests are open as are computed at a time."""
    bars: list[Bar] = []
    num_open: list[int] = []

    class Watching(Bar):
        def update(self, number: int) -> None:
            super().update(number)
            num_open.append(len(llm._engine._open))

    def make(**options: Any) -> Bar:
        bars.append(Watching(**options))
        return bars[-1]

    each = [SamplingParams(temperature=0, max_tokens=1 + 7 * n % 40) for n in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, each, use_tqdm=make)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    assert [len(tokens) for tokens in token_ids(outputs)] == [one.max_tokens for one in each]
    assert token_ids(outputs) == [
        tokens[: one.max_tokens]
        for tokens, one in zip(expected(PROMPTS, GREEDY), each, strict=True)
    ]
    assert [(bar.total, bar.count, bar.is_closed) for bar in bars] == [(100, 100, True)]
    assert 16 < max(num_open) <= 32


def test_seed_of_the_engine_decides_those_that_are_not_given() -> None:
    """Without a seed, prompts get different ones, and the same ones in the next program."""

    def texts(seed: int) -> list[list[int]]:
        engine = LLM("null", engine=InprocEngine(configure(model="null")), seed=seed)
        seeds = [engine._engine.draw_seed() for _ in range(3)]
        engine.close()
        return [seeds]

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)
    assert len(set(texts(0)[0])) == 3


def test_kill_9_during_generate_changes_no_result(llm: LLM) -> None:
    bar = Bar(total=0)
    results: list[Any] = []

    def generate() -> None:
        results.extend(llm.generate(PROMPTS, GREEDY, use_tqdm=lambda **_: bar))

    engine = RunningEngine(llm.run_dir)
    engine.ready()
    thread = threading.Thread(target=generate)
    thread.start()
    try:
        for count, victim in ((10, Role.WORKER), (40, Role.CORE)):
            eventually(lambda at_least=count: bar.count >= at_least, "some prompts have ended")
            engine.kill(victim)
        assert bar.count < len(PROMPTS)
    finally:
        thread.join(60)
        engine.close()
    assert token_ids(results) == expected(PROMPTS, GREEDY)


def test_output_is_confined(llm: LLM) -> None:
    choices = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(structured_outputs=choices, max_tokens=20)
    outputs = llm.generate(PROMPTS[:10], params, use_tqdm=False)
    assert {output.outputs[0].text for output in outputs} <= {"yes", "no"}
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
    params = SamplingParams(structured_outputs={"json": {"type": "boolean"}}, max_tokens=20)
    [output] = llm.generate("x", params, use_tqdm=False)
    assert output.outputs[0].text in ("true", "false")
    with pytest.raises(ValueError, match="structured_outputs: is empty"):
        SamplingParams(structured_outputs=StructuredOutputsParams())


def test_tokens_and_words_reach_the_engine() -> None:
    params = SamplingParams(bad_words=["no"], allowed_token_ids=[77], logprob_token_ids=[99])
    facts, tokenizer = null_facts(configure(model="null")), ByteTokenizer()
    engine_params = resolved(params, facts, tokenizer, 3, seed=0, index=0)
    assert engine_params.bad_words == [[FIRST_BYTE_ID + byte for byte in b"no"]]
    assert (engine_params.allowed_token_ids, engine_params.logprob_token_ids) == ([77], [99])


def test_chat_renders_the_template(llm: LLM) -> None:
    chat = [{"role": "user", "content": "hi"}]
    [one] = llm.chat(chat, GREEDY, use_tqdm=False)
    assert one.prompt == "user: hi\nassistant: "
    several = llm.chat([chat, chat], GREEDY, use_tqdm=False)
    assert token_ids(several) == 2 * token_ids([one])
    [open_end] = llm.chat(chat, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert open_end.prompt == "user: hi\n"
    begun = [*chat, {"role": "assistant", "content": "I"}]
    [continued] = llm.chat(begun, GREEDY, use_tqdm=False, continue_final_message=True)
    assert continued.prompt == "user: hi\nassistant: I"


def test_vectors_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    vectors = [output.outputs.embedding for output in llm.embed(PROMPTS, use_tqdm=False)]
    alone = [llm.embed(prompt, use_tqdm=False)[0] for prompt in PROMPTS[::20]]
    assert [output.outputs.embedding for output in alone] == vectors[::20]
    assert [output.prompt_token_ids for output in alone] == PROMPTS[::20]
    assert len(set(map(tuple, vectors))) == len(PROMPTS)
    pooling = Pooling(PoolingType.MEAN, dimensions=3)
    assert len(llm.embed("hi", use_tqdm=False, pooling_params=pooling)[0].outputs.embedding) == 3
    pooling = Pooling(dimensions=9999)
    with pytest.raises(InvalidRequest, match=r"prompts\[0\]: dimensions 9999 is more than the 16"):
        llm.embed("hi", use_tqdm=False, pooling_params=pooling)


def test_encode_returns_the_vectors_of_embed(llm: LLM) -> None:
    vectors = [output.outputs.embedding for output in llm.embed(PROMPTS[:3], use_tqdm=False)]
    for task in (None, "embed"):
        encoded = llm.encode(PROMPTS[:3], use_tqdm=False, pooling_task=task)
        assert [output.outputs.data for output in encoded] == vectors
        assert [output.prompt_token_ids for output in encoded] == PROMPTS[:3]
    pooling = Pooling(PoolingType.MEAN, dimensions=3)
    assert len(llm.encode("hi", pooling, use_tqdm=False)[0].outputs.data) == 3
    with pytest.raises(InvalidRequest, match="pooling_task: 'token_embed' is not supported, only"):
        llm.encode("hi", pooling_task="token_embed")
    with pytest.raises(InvalidRequest, match="classification head"):
        llm.encode("hi", pooling_task="classify")


def test_the_tokenizer_makes_the_ids_that_are_computed(llm: LLM) -> None:
    tokenizer, one = llm.get_tokenizer(), SamplingParams(max_tokens=1)
    [output] = llm.generate("a text", one, use_tqdm=False)
    assert tokenizer.encode("a text") == output.prompt_token_ids
    assert tokenizer.decode(output.prompt_token_ids, skip_special_tokens=True) == "a text"
    assert tokenizer.decode(output.prompt_token_ids[-1]) == "t"
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (32000, 2)
    chat = [{"role": "user", "content": "hi"}]
    for options in ({}, {"add_generation_prompt": True}):
        add = bool(options)
        [answer] = llm.chat(chat, one, use_tqdm=False, add_generation_prompt=add)
        text = tokenizer.apply_chat_template(chat, tokenize=False, **options)
        assert (type(text), text) == (str, answer.prompt)
        assert tokenizer.apply_chat_template(chat, **options) == answer.prompt_token_ids
    with pytest.raises(InvalidRequest, match="role"):
        tokenizer.apply_chat_template([{"role": "x", "content": "a"}])


def test_metrics_count_what_was_generated(llm: LLM) -> None:
    """The core reports them about once a second; an engine in this process has them at once."""

    def tokens(one: LLM) -> int:
        values = {metric.name: metric for metric in one.get_metrics()}
        counter = values["troika:generation_tokens"]
        assert isinstance(counter, Counter)
        assert counter.labels == {"model_name": "null"}
        assert isinstance(values["troika:num_requests_running"], Gauge)
        return counter.value

    before = tokens(llm)
    llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    eventually(lambda: tokens(llm) >= before + 160, "the tokens are counted")
    with LLM("null", engine=InprocEngine(configure(model="null"))) as here:
        here.generate([[5], [6]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert tokens(here) == 6


def test_beam_search_finds_the_same_beams_in_processes_and_in_this_one(llm: LLM) -> None:
    """Kills do not change them: tests/system/api/test_sequence_options.py."""
    params = BeamSearchParams(beam_width=3, max_tokens=12, length_penalty=0.5)
    prompts = PROMPTS[:5]
    outputs = llm.beam_search(prompts, params)
    inproc = LLM(engine=InprocEngine(configure(model="null")))
    try:
        assert inproc.beam_search(prompts, params) == outputs
    finally:
        inproc.close()
    for prompt, output in zip(prompts, outputs, strict=True):
        scores = []
        for sequence in output.sequences:
            tokens = sequence.tokens[len(prompt) :]
            assert sequence.tokens[: len(prompt)] == prompt
            rows = sequence.logprobs
            sampled = [row[i].logprob for row, i in zip(rows, tokens, strict=True)]
            assert sequence.cum_logprob == pytest.approx(sum(sampled))
            has_ended = sequence.finish_reason == "stop"
            assert has_ended or len(tokens) == 12
            scores.append(sequence.cum_logprob / max(1, len(tokens) - has_ended) ** 0.5)
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(sequence.tokens) for sequence in output.sequences}) == 3
    [one] = llm.beam_search("hi", BeamSearchParams(beam_width=1, max_tokens=3, ignore_eos=True))
    [greedy] = llm.generate("hi", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert one.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids
    assert one.sequences[0].text == "hi" + greedy.outputs[0].text


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
def test_bounds_of_beam_search(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: "):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 5} | fields))


def test_what_concerns_the_prompt_is_asked_for_once(llm: LLM) -> None:
    params = SamplingParams(n=3, prompt_logprobs=2)
    facts, tokenizer = null_facts(configure(model="null")), ByteTokenizer()
    asked = [
        resolved(params, facts, tokenizer, 5, seed=1, index=index).prompt_logprobs
        for index in range(3)
    ]
    assert asked == [2, None, None]


def test_repetitions_and_thinking_budgets(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^repetition_detection\.min_count: "):
        SamplingParams(repetition_detection=RepetitionDetectionParams(max_pattern_size=2))
    with pytest.raises(ValueError, match=r"^thinking_token_budget: "):
        SamplingParams(thinking_token_budget=-2)
    regex = StructuredOutputsParams(regex="(ab){30}")
    detection = RepetitionDetectionParams(max_pattern_size=2, min_count=9)
    params = SamplingParams(max_tokens=80, structured_outputs=regex, repetition_detection=detection)
    [output] = llm.generate("hi", params, use_tqdm=False)
    assert output.outputs[0].text == "ab" * 9
    assert output.outputs[0].finish_reason == "repetition"
    with pytest.raises(InvalidRequest, match="thinking_token_budget"):
        llm.generate("hi", SamplingParams(thinking_token_budget=3), use_tqdm=False)


def test_stop_strings_and_stop_tokens_end_a_sequence(llm: LLM) -> None:
    [[*ids]] = token_ids(llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False))
    text = [f"<{token_id}>" for token_id in ids]
    stop = text[2]
    cases: list[tuple[dict[str, Any], str, Any]] = [
        ({"stop": stop}, "".join(text[:2]), stop),
        ({"stop": [stop, "none"], "include_stop_str_in_output": True}, "".join(text[:3]), stop),
        ({"stop_token_ids": [ids[2]]}, "".join(text[:2]), ids[2]),
    ]
    params = [SamplingParams(temperature=0, max_tokens=9, **options) for options, _, _ in cases]
    outputs = llm.generate([PROMPTS[0]] * 3, params, use_tqdm=False)
    for output, (_, shown, reason) in zip(outputs, cases, strict=True):
        [item] = output.outputs
        assert (item.text, item.finish_reason, item.stop_reason) == (shown, "stop", reason)
    [silent] = llm.generate("hi", SamplingParams(detokenize=False), use_tqdm=False)
    assert (silent.outputs[0].text, len(silent.outputs[0].token_ids)) == ("", 16)


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
        ({"load_format": "gguf"}, "load_format: 'gguf' is not supported, only 'auto' is"),
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


def test_parameters_and_priorities_are_one_for_each_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="sampling_params: there are 2 for 3 prompts"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY], use_tqdm=False)
    for bad in ("greedy", {"max_tokens": 3}, [{"max_tokens": 3}]):
        with pytest.raises(InvalidRequest, match="sampling_params: must be SamplingParams, or a"):
            llm.generate(["a"], bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.role: 'x' is not one of assistant, "):
        llm.chat([{"role": "user", "content": "a"}, {"role": "x", "content": "b"}])
    with pytest.raises(InvalidRequest, match="priority: there are 1 for 2 prompts"):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[1])
    assert len(llm.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[1, 2])) == 2


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


async def stream_all(llm: AsyncLLM) -> None:
    """The kinds of outputs of one prompt add up to the same result."""
    whole = {}
    for kind in RequestOutputKind:
        params = SamplingParams(
            temperature=0, max_tokens=30, n=2, seed=1, logprobs=1, output_kind=kind
        )
        outputs = [output async for output in llm.generate([5, 6, 7], params)]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
        last = outputs[-1].outputs
        if kind is RequestOutputKind.DELTA:
            for item in last:
                parts = [output.outputs[item.index] for output in outputs]
                item.text = "".join(part.text for part in parts)
                item.token_ids = [token for part in parts for token in part.token_ids]
                item.logprobs = [row for part in parts for row in part.logprobs or []]
        whole[kind] = last
    assert whole[RequestOutputKind.DELTA] == whole[RequestOutputKind.FINAL_ONLY]
    assert whole[RequestOutputKind.CUMULATIVE] == whole[RequestOutputKind.FINAL_ONLY]
    assert len(whole[RequestOutputKind.DELTA][0].token_ids) == 30


LONG = SamplingParams(temperature=0, max_tokens=6000)


async def embed(llm: AsyncLLM) -> None:
    """Vectors are the same one by one and at once; a cancelled task leaves no request."""
    vectors = await asyncio.gather(*(llm.embed(prompt) for prompt in PROMPTS[:8]))
    assert [output.prompt_token_ids for output in vectors] == PROMPTS[:8]
    assert (await llm.embed(PROMPTS[3])).outputs == vectors[3].outputs
    short = await llm.embed("hi", Pooling(PoolingType.MEAN, dimensions=3), priority=1)
    assert len(short.outputs.embedding) == 3
    with pytest.raises(InvalidRequest, match="dimensions 9999 is more than the 16"):
        await llm.embed("hi", Pooling(dimensions=9999))
    client = llm._processes._client
    assert client is not None
    task = asyncio.create_task(llm.embed([5] * 4000))
    while not client.num_open_requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.num_open_requests == 0


async def leave_early(llm: AsyncLLM) -> None:
    """Leaving, cancelling and aborting end a request in the engine."""
    async with aclosing(llm.generate([5], LONG)) as outputs:
        async for _ in outputs:
            break

    async def read() -> None:
        async for _ in llm.generate([6], LONG, "to be cancelled"):
            began.set()

    began = asyncio.Event()
    reader = asyncio.create_task(read())
    await began.wait()
    with pytest.raises(InvalidRequest, match="'to be cancelled' is the id of an open request"):
        await anext(llm.generate([6], LONG, "to be cancelled"))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    ends = []
    async for output in llm.generate([7], LONG, "to be aborted"):
        await llm.abort("to be aborted")
        ends.append(output)
    assert (ends[-1].finished, ends[-1].outputs[0].finish_reason) == (True, "abort")
    assert not llm._engine._open
    client = llm._processes._client
    assert client is not None
    assert client.num_open_requests == 0
    async with asyncio.timeout(10):
        while client.status is None or client.status.stats.num_running_reqs:
            await asyncio.sleep(0.05)


def test_async_llm_streams_and_aborts_and_leaves_the_host_as_it_was() -> None:
    async def main() -> None:
        before = host_state.settings()
        async with AsyncLLM("null", **SETTINGS) as llm:
            await stream_all(llm)
            await leave_early(llm)
            await embed(llm)
            reading = asyncio.create_task(anext(llm.generate([8], LONG)))
            await reading
            open_end = llm.generate([9], LONG)
            await anext(open_end)
        with pytest.raises(RequestFailed, match="closed"):
            _ = [output async for output in open_end]
        await llm.close()
        assert host_state.changes(before, host_state.settings()) == []

    asyncio.run(main())


def test_close_is_idempotent_and_quick_in_any_state() -> None:
    before = host_state.settings()
    descriptors = host_state.resources()["descriptors"]
    llm = LLM("null", **SETTINGS)
    failures: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        except RequestFailed as failure:
            failures.append(failure)

    thread = threading.Thread(target=generate)
    thread.start()
    eventually(lambda: llm._engine._open, "requests run")
    began = time.monotonic()
    llm.close()
    llm.close()
    assert time.monotonic() - began < 9.0
    thread.join(10)
    assert [type(failure) for failure in failures] != []
    with pytest.raises(RequestFailed, match="closed"):
        llm.generate([[1]], use_tqdm=False)
    assert host_state.changes(before, host_state.settings()) == []
    eventually(lambda: host_state.resources()["descriptors"] == descriptors, "nothing is left")


def test_interrupt_aborts_the_requests(llm: LLM) -> None:
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner may ignore it
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, former)
    eventually(lambda: not llm._engine._open, "no request is open")
    assert len(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)) == 2


def test_threads_and_loops_share_an_engine(llm: LLM) -> None:
    async def in_a_loop(prompts: list[list[int]]) -> list[list[int]]:
        return token_ids(llm.generate(prompts, GREEDY, use_tqdm=False))

    parts = [PROMPTS[first::4] for first in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda prompts: asyncio.run(in_a_loop(prompts)), parts))
    tokens = expected(PROMPTS, GREEDY)
    assert results == [tokens[first::4] for first in range(4)]


def test_fork_of_the_host_does_not_end_the_engine(llm: LLM) -> None:
    pid = os.fork()
    if pid == 0:
        llm.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)) == 2


def test_start_that_is_cancelled_leaves_no_process() -> None:
    async def main() -> str:
        llm = AsyncLLM("null", **SETTINGS)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.start(), 0.05)
        return llm.run_dir

    assert not os.path.exists(asyncio.run(main()))


def test_engine_ends_with_its_object_and_with_its_program() -> None:
    """Without a main guard and without `close`."""
    source = """
import os
from api_proc.llm import LLM
from scripts.testing import eventually
llm = LLM("null", log_level="error")
run_dir = llm.run_dir
assert len(llm.generate([[1], [2]], use_tqdm=False)) == 2
del llm
eventually(lambda: not os.path.exists(run_dir), "the engine has ended")
llm = LLM("null", log_level="error")
assert len(llm.generate([[1], [2]], use_tqdm=False)) == 2
print(llm.run_dir)
"""
    command = [sys.executable, "-c", source]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    run_dir = done.stdout.strip()
    eventually(lambda: not os.path.exists(run_dir), "the engine has ended")


def test_arguments_of_vllm_become_settings() -> None:
    arguments = {
        "dtype": "half",
        "enforce_eager": True,
        "gpu_memory_utilization": 0.5,
        "max_model_len": 512,
        "quantization": None,
        "seed": None,
        "swap_space": 4,
        "tokenizer": Path("/t"),
        "trust_remote_code": True,
    }
    config = engine_config("m", arguments)
    model = config.model
    assert config.worker.enforce_eager
    assert (model.model, model.tokenizer, model.dtype) == ("m", "/t", Dtype.FLOAT16)
    assert (model.max_model_len, model.seed) == (512, 0)
    assert engine_config("m", {"seed": 7}).model.seed == 7
    parallel = engine_config("m", {"data_parallel_size": 2, "pipeline_parallel_size": 2}).parallel
    assert (parallel.data_parallel_size, parallel.pipeline_parallel_size) == (2, 2)


EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


SHARED = """import contextlib
from api_proc.llm import LLM
shared = contextlib.nullcontext(LLM("null"))
"""


@pytest.mark.parametrize("first", [0, 1])
def test_documented_examples_run(first: int) -> None:
    """The first one with the demo model as it is written, the others with one of the null model."""
    source = EXAMPLES[0]
    if first == 1:
        others = "".join(EXAMPLES[1:]).replace('with LLM("demo") as llm:', "with shared as llm:")
        source = SHARED + others.replace('"demo"', '"null"')
    command = [sys.executable, "-W", "error", "-c", source]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    if first == 0:
        assert "self.name" in done.stdout
