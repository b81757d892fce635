"""Outputs under a grammar: valid, the same with drafts and after preemptions, and ended by EOS."""

import json
import random
import shutil
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig

from protocol.config.settings import configure
from protocol.core_worker import NewRequestData
from protocol.message import pack_token_ids
from protocol.sampling import Grammar, GrammarKind, SamplingParams
from tests.paths import DEMO_MODEL
from tests.worker.checkpoints import build_checkpoint
from tests.worker.driving import drive
from tests.worker.grammar.json_schemas import schemas, validate
from tests.worker.steps import step
from worker_proc.model_runner import ModelRunner
from worker_proc.startup.load_runner import load_model_runner

MAX_TOKENS = 250
EOS = 0


@cache
def demo(num_speculative_tokens: int = 0) -> ModelRunner:
    torch.set_num_threads(1)
    config = configure(
        model=str(DEMO_MODEL),
        num_gpu_blocks_override=600,
        num_threads=1,
        num_speculative_tokens=num_speculative_tokens,
    )
    return load_model_runner(config, lambda *_: None)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A model with random weights, and the tokens of the demo model."""
    directory = tmp_path_factory.mktemp("random")
    shape = json.loads((DEMO_MODEL / "config.json").read_text())
    shape |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    build_checkpoint(directory, LlamaConfig(**shape))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, directory)
    torch.set_num_threads(1)
    config = configure(model=str(directory), num_gpu_blocks_override=2500, num_threads=1)
    return load_model_runner(config, lambda *_: None)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def text_of(token_ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(token_ids), skip_special_tokens=True))


def json_schema(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def params_of(grammar: Grammar | None, seed: int, **more: object) -> SamplingParams:
    fields: dict[str, object] = {
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0 if seed % 2 else 1.0,
        "seed": seed,
        "grammar": grammar,
    }
    return SamplingParams(**(fields | more))  # type: ignore[arg-type]


def prompt(number: int) -> list[int]:
    return tokenizer().encode(f"# case {number}\nreturn ").ids


def check_outputs(chosen: list[object], outputs: list[list[int]]) -> None:
    """Every output that has ended is JSON that follows its schema; others may be cut."""
    num_ended = 0
    for schema, token_ids in zip(chosen, outputs, strict=True):
        if token_ids[-1] == EOS:
            num_ended += 1
            validate(json.loads(text_of(token_ids)), schema)
        else:
            assert len(token_ids) == MAX_TOKENS
    assert num_ended >= 0.8 * len(outputs)


def test_outputs_follow_their_schemas_among_unconstrained_requests() -> None:
    chosen = schemas()[::7]
    params = [params_of(json_schema(schema), seed) for seed, schema in enumerate(chosen)]
    free = [params_of(None, seed, max_tokens=20, ignore_eos=True) for seed in range(4)]
    prompts = [prompt(number) for number in range(len(chosen) + 4)]
    outputs = drive(demo(), prompts, params + free).output_token_ids
    check_outputs(list(chosen), outputs[: len(chosen)])
    assert drive(demo(), prompts[-4:], free).output_token_ids == outputs[-4:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_outputs_follow_their_schemas() -> None:
    chosen = schemas() * 10
    params = [params_of(json_schema(schema), seed) for seed, schema in enumerate(chosen)]
    prompts = [prompt(number) for number in range(len(chosen))]
    check_outputs(list(chosen), drive(demo(), prompts, params).output_token_ids)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_outputs_of_random_weights_follow_their_schemas(
    random_model: ModelRunner,
) -> None:
    """As many requests have no constraints. A cut output is the beginning of a valid one."""
    chosen = schemas() * 10
    each = enumerate(chosen)
    params = [params_of(json_schema(schema), seed, max_tokens=500) for seed, schema in each]
    free = [params_of(None, seed, max_tokens=30, ignore_eos=True) for seed in range(len(chosen))]
    mixed = [param for pair in zip(params, free, strict=True) for param in pair]
    prompts = [prompt(number) for number in range(len(mixed))]
    outputs = drive(random_model, prompts, mixed).output_token_ids
    alone = drive(random_model, prompts[1:40:2], free[:20]).output_token_ids
    assert outputs[1:40:2] == alone
    assert random_model.grammars is not None
    num_ended = 0
    for schema, token_ids in zip(chosen, outputs[::2], strict=True):
        if token_ids[-1] == EOS:
            num_ended += 1
            validate(json.loads(text_of(token_ids)), schema)
        else:
            assert len(token_ids) == 500
            matcher = random_model.grammars.matcher(json_schema(schema))
            assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert num_ended >= 0.6 * len(chosen)


def test_drafts_and_preemptions_change_no_token() -> None:
    """Matchers are rebuilt from the outputs; drafts are verified under the mask."""
    chosen = schemas()[1::9]
    more: dict[str, object] = {"max_tokens": 60, "repetition_penalty": 1.1, "min_tokens": 5}
    params = [params_of(json_schema(schema), seed, **more) for seed, schema in enumerate(chosen)]
    prompts = [prompt(number) for number in range(len(chosen))]
    plain = drive(demo(), prompts, params)
    assert plain.num_preemptions == 0
    tight = drive(demo(), prompts, params, num_blocks=12)
    assert tight.num_preemptions > 0
    assert tight.output_token_ids == plain.output_token_ids
    guessed = drive(demo(4), prompts, params, num_speculative_tokens=4)
    assert guessed.output_token_ids == plain.output_token_ids
    assert guessed.num_accepted_drafts > 0.2 * sum(map(len, plain.output_token_ids))


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Grammar(GrammarKind.REGEX, "yes"), {"yes"}),
        (Grammar(GrammarKind.LARK, 'start: "red" | "green"'), {"red", "green"}),
        (Grammar(GrammarKind.EBNF, 'root ::= "x" ("1" | "2")'), {"x1", "x2"}),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"const": "done"}'), {'"done"'}),
    ],
)
def test_a_grammar_that_is_complete_ends_the_output(grammar: Grammar, expected: set[str]) -> None:
    """It does so even if min_tokens asks for more, EOS is ignored, or a bias is against it."""
    options: list[dict[str, object]] = [
        *({}, {"min_tokens": 30}, {"ignore_eos": True}),
        {"logit_bias": {EOS: -100.0}, "logprobs": 2},
    ]
    params = [params_of(grammar, seed, **more) for seed, more in enumerate(options)]
    outputs = drive(demo(), [prompt(1)] * len(params), params).output_token_ids
    for token_ids in outputs:
        assert token_ids[-1] == EOS
        assert text_of(token_ids) in expected


def test_a_token_is_one_of_those_that_the_grammar_allows() -> None:
    """No bias and no filter leads out of random grammars of letters."""
    random.seed(1)
    for seed in range(6):
        letters = "".join(random.sample("abcdefghij", 3))
        grammar = Grammar(GrammarKind.REGEX, f"[{letters}]{{5,40}}")
        bias = dict.fromkeys(range(300, 400), 50.0)
        params = params_of(grammar, seed, logit_bias=bias, top_k=2, top_p=0.5, logprobs=1)
        [token_ids] = drive(demo(), [prompt(seed)], params).output_token_ids
        assert set(text_of(token_ids)) <= set(letters)
        assert 5 <= len(text_of(token_ids)) <= 40


def test_a_request_whose_outputs_do_not_follow_its_grammar_fails_alone() -> None:
    runner = demo()
    runner.reset()

    def new(req_id: int, outputs: list[int], block: int) -> NewRequestData:
        params = params_of(Grammar(GrammarKind.REGEX, "[0-9]+"), 1)
        ids = [5, 6, 7, *outputs]
        return NewRequestData(req_id, pack_token_ids(ids), 3, params, [[block]], 0, 0)

    wrong = tokenizer().encode("abc").ids
    right = tokenizer().encode("123").ids
    count = {1: 3 + len(right), 2: 3 + len(wrong)}
    news = [new(1, right, 1), new(2, wrong, 2)]
    output = runner.execute(step(0, sum(count.values()), news, counts=count))
    assert list(output.request_errors) == [2]
    assert "does not allow" in output.request_errors[2]
    runner.reset()
