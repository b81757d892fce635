"""The end of reasoning is forced after its budget: the same with drafts, grammars, preemption."""

import random

import pytest
import torch

from api_proc.chat.events import ReasoningDelta
from api_proc.chat.parser import OutputParser
from api_proc.text.processor import TextProcessor
from api_proc.text.thinking import thinking_budget
from api_proc.text.tokenizer import EncodeOptions
from protocol.config.settings import configure
from protocol.model_facts import ModelFacts
from protocol.sampling import Grammar, GrammarKind, SamplingParams, ThinkingBudget
from tests.worker.driving import Run, drive
from tests.worker.grammar.test_structured_output import demo
from tests.worker.sampling.test_sampler_edits import Row
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.vocabulary import Vocabulary
from worker_proc.model_runner import ModelRunner
from worker_proc.native.kernels import NativeLibrary
from worker_proc.null.runner import NullRunner
from worker_proc.sampling.sampler import Sampler
from worker_proc.sampling.thinking import forced_token

VOCAB, EOS = 64, 2
BEGIN, END = [60, 61], [50, 51, 50, 52]
SPACES = [40, 41]
FACTS = ModelFacts("null", 1000, 2048, 16, 200, [EOS])


def follow(script: list[int], budget: ThinkingBudget, num_tokens: int = 60) -> list[int]:
    """Return an output whose tokens are those of a script where nothing is forced."""
    tokens = [1, 2, 3]
    for place in range(num_tokens):
        forced = forced_token(tokens, 3, budget)
        tokens.append(script[place] if forced is None else forced)
    return tokens[3:]


def expected(script: list[int], budget: ThinkingBudget) -> list[int]:
    """The same, from the definition: one pass that keeps its state."""
    begin, end = budget.begin_token_ids, budget.end_token_ids
    num_spaces = 0
    while begin and script[num_spaces] in budget.space_token_ids:
        num_spaces += 1
    first = num_spaces + len(begin)
    if script[num_spaces:first] != begin:
        return script
    for place in range(first, first + budget.max_tokens + 1):
        reasoning = script[first:place]
        if any(reasoning[i : i + len(end)] == end for i in range(len(reasoning))):
            return script
    known = next(
        n for n in range(len(end) - 1, -1, -1) if reasoning[len(reasoning) - n :] == end[:n]
    )
    forced = end[known:]
    return (script[:place] + forced + script[place + len(forced) :])[: len(script)]


@pytest.mark.parametrize(("begin", "has_spaces"), [([], False), (BEGIN, False), (BEGIN, True)])
@pytest.mark.parametrize("end", [END, END[:1]])
def test_the_forced_tokens_follow_from_the_ids(
    begin: list[int], end: list[int], has_spaces: bool
) -> None:
    """Outputs begin with the marker, with white space or not, or with parts of the end."""
    num_forced = 0
    for seed in range(400):
        chance = random.Random(seed)
        script = [
            chance.choice(SPACES) for _ in range(chance.choice([0, 0, 1, 3, 30]) * has_spaces)
        ]
        script += begin if chance.random() < 0.8 else []
        while len(script) < 60:
            script += chance.choice([[7], [8], end, end[:2], end[:3], begin, SPACES[:1]])
        script = script[:60]
        spaces = SPACES if has_spaces else []
        budget = ThinkingBudget(chance.choice([0, 1, 2, 5, 20, 40]), begin, end, [], spaces)
        output = follow(script, budget)
        assert output == expected(script, budget), (script, budget)
        num_forced += output != script
    assert 20 < num_forced < 400


BEFORE_THE_MARKER = [
    *("", " ", "\n", "\n\n", "\r\n \t", " \v\f ", " " * 90),
    *("x", " x ", "\u00a0", "\u3000", "\x1c", "\x85", "<", "<th", "<think", ".\n"),
]


@pytest.mark.parametrize("before", BEFORE_THE_MARKER)
def test_the_budget_begins_where_the_parser_finds_reasoning(before: str) -> None:
    text = TextProcessor.load(configure(model="null", reasoning_parser="qwen3").model)
    budget = thinking_budget(text, [5], 9)
    assert budget is not None
    output = f"{before}<think>{'r' * 9}"
    token_ids = text.tokenizer.encode(output, EncodeOptions(False, 10**4))
    parser = OutputParser(text.dialect, schemas=None, is_reasoning_open=False, make_id=str)
    counter = parser.reasoning_counter(text.tokenizer.token_bytes)
    assert counter is not None
    counter.push(token_ids)
    reasons = any(isinstance(event, ReasoningDelta) for event in parser.push(output))
    forced = [forced_token([5, *token_ids[:n]], 1, budget) for n in range(len(token_ids) + 1)]
    assert forced[:-1] == [None] * len(token_ids)
    assert (forced[-1] is not None) == reasons == (counter.num_tokens == 9)
    text.close()


def test_no_edit_and_no_sampling_leads_past_the_forced_token(
    sampling_library: NativeLibrary | None,
) -> None:
    sampler = Sampler(VOCAB, (EOS,), torch.device("cpu"), sampling_library)
    budget = ThinkingBudget(3, [], [50])
    options = [
        {"temperature": 0.0},
        {"temperature": 1.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
        {"logit_bias": {50: -100.0, 9: 100.0}, "repetition_penalty": 9.0},
        {"bad_words": [[50]], "allowed_token_ids": [9]},
        {"min_tokens": 9, "stop_token_ids": [50]},
    ]
    torch.manual_seed(3)
    for fields in options:
        params = SamplingParams(thinking_budget=budget, **fields)  # type: ignore[arg-type]
        rows = [Row(params, [1, *[9] * n], 1) for n in range(7)]
        logits = torch.randn(len(rows), VOCAB)
        logits[:, 50] = -20.0
        tokens = sampler.sample(logits, rows).token_ids
        assert tokens[3] == 50, fields
        plain = [Row(SamplingParams(**fields), row.token_ids, 1) for row in rows]  # type: ignore[arg-type]
        others = sampler.sample(logits, plain).token_ids
        assert [t for i, t in enumerate(tokens) if i != 3] == [
            t for i, t in enumerate(others) if i != 3
        ]


def run(runner: NullRunner | ModelRunner, budget: ThinkingBudget | None, **options: object) -> Run:
    more = options.pop("more", {})
    fields = {"max_tokens": 50, "temperature": 0.9, "ignore_eos": True, "seed": 5}
    params = SamplingParams(thinking_budget=budget, **{**fields, **more})  # type: ignore
    prompts = [[5 + n, 6, 7, 8] * 3 for n in range(5)]
    return drive(runner, prompts, params, **options)


@pytest.mark.parametrize("kind", ["null", "demo"])
def test_outputs_are_the_same_with_drafts_and_after_preemptions(kind: str) -> None:
    budget = ThinkingBudget(12, [], END)

    def runner(drafts: int = 0) -> NullRunner | ModelRunner:
        is_null = kind == "null"
        return NullRunner(FACTS, num_speculative_tokens=drafts) if is_null else demo(drafts)

    free = run(runner(), None).output_token_ids
    outputs = run(runner(), budget).output_token_ids
    for output, other in zip(outputs, free, strict=True):
        assert output[:16] == other[:12] + END
    tight = run(runner(), budget, num_blocks=12)
    assert tight.num_preemptions > 0
    assert tight.output_token_ids == outputs
    guessed = run(runner(4), budget, num_speculative_tokens=4)
    assert guessed.output_token_ids == outputs
    assert guessed.num_accepted_drafts > 0


def test_a_call_ends_reasoning_without_its_marker() -> None:
    """The end marker is not written into the arguments of a call."""
    budget = ThinkingBudget(3, [], [8, 9], [7])
    assert forced_token([1, 5, 5, 5], 1, budget) == 8
    assert forced_token([1, 5, 7, 5], 1, budget) is None
    assert forced_token([7, 5, 5, 5], 1, budget) == 8


def test_a_grammar_comes_before_the_budget() -> None:
    """What it does not allow is not forced; what it allows is. Drafts change nothing."""
    ids = [3 + byte for byte in b"</t>"]
    budget = ThinkingBudget(6, [], ids)
    for regex, is_forced in (("[a-z</>]{40}", True), ("[a-z]{40}", False)):
        more = {"grammar": Grammar(GrammarKind.REGEX, regex)}
        runner = NullRunner(FACTS, grammars=byte_grammars())
        outputs = run(runner, budget, more=more).output_token_ids
        for output in outputs:
            assert len(output) == 41
            assert (output[6:10] == ids) == is_forced
        # Most of these drafts are not among the bytes that the grammar knows.
        runner = NullRunner(FACTS, grammars=byte_grammars(), num_speculative_tokens=3)
        guessed = run(runner, budget, more=more, num_speculative_tokens=3)
        assert guessed.output_token_ids == outputs


def byte_grammars() -> GrammarCompiler:
    grammars = GrammarCompiler(Vocabulary([EOS]))
    grammars.load()
    return grammars
