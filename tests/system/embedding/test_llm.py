"""The Python interface: the shape of results, their order, and deaths of processes."""

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from api_proc.llm import (
    LLM,
    BeamSearchParams,
    Pooling,
    PoolingType,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from api_proc.llm.metrics import Counter, Gauge
from api_proc.llm.sampling import resolved
from api_proc.llm.settings import engine_config
from api_proc.text.checkpoint import SamplingDefaults
from api_proc.text.tokenizer import FIRST_BYTE_ID, ByteTokenizer
from protocol.client.errors import InvalidRequest
from protocol.config import Dtype
from protocol.config.settings import configure
from protocol.lifecycle import Role
from scripts.inprocess import InprocEngine
from scripts.testing import RunningEngine, eventually
from tests.paths import ROOT
from tests.system.embedding.generation import GREEDY, PROMPTS, SETTINGS, Bar, expected, token_ids
from worker_proc.startup.start import null_facts

PAGE = ROOT / "docs" / "python.md"


def test_replicas_compute_what_one_engine_computes() -> None:
    with LLM("null", data_parallel_size=2, **SETTINGS) as llm:
        found = token_ids(llm.generate(PROMPTS[:8], GREEDY, use_tqdm=False))
    assert found == expected(PROMPTS[:8], GREEDY)


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
    engine_params = resolved(
        params, facts, tokenizer, 3, defaults=SamplingDefaults(), seed=0, index=0
    )
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
        tokenizer.apply_chat_template([{"role": "", "content": "a"}])


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


def test_what_concerns_the_prompt_is_asked_for_once(llm: LLM) -> None:
    params = SamplingParams(n=3, prompt_logprobs=2)
    facts, tokenizer = null_facts(configure(model="null")), ByteTokenizer()
    asked = [
        resolved(
            params, facts, tokenizer, 5, defaults=SamplingDefaults(), seed=1, index=index
        ).prompt_logprobs
        for index in range(3)
    ]
    assert asked == [2, None, None]


def test_repetitions_and_thinking_budgets_end_outputs(llm: LLM) -> None:
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


def test_parameters_and_priorities_are_one_for_each_prompt(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="sampling_params: there are 2 for 3 prompts"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY], use_tqdm=False)
    for bad in ("greedy", {"max_tokens": 3}, [{"max_tokens": 3}]):
        with pytest.raises(InvalidRequest, match="sampling_params: must be SamplingParams, or a"):
            llm.generate(["a"], bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.role: "):
        llm.chat([{"role": "user", "content": "a"}, {"role": "", "content": "b"}])
    with pytest.raises(InvalidRequest, match="priority: there are 1 for 2 prompts"):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[1])
    assert len(llm.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[1, 2])) == 2


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
