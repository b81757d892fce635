"""Answers that contain the text of a special token, which is written with other tokens."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from protocol.sampling import Grammar, GrammarKind
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.masks import MaskComputer, MaskedRows
from worker_proc.grammar.state import GrammarState
from worker_proc.grammar.vocabulary import Vocabulary

SPECIAL = ("</s>", "<b>", "</b>", "<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for each byte, and added tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: token_id for token_id, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = tokenizer.token_to_id("</s>")
    return GrammarCompiler(Vocabulary([eos], str(directory)))


def state_of(compiler: GrammarCompiler, grammar: Grammar) -> GrammarState:
    matcher = compiler.matcher(grammar)
    return GrammarState(matcher, 0, num_tokens=compiler.num_tokens, tokenizer=compiler.tokenizer)


CASES = [
    (GrammarKind.REGEX, r"<b>x{2}</b>", "<b>xx</b>"),
    (GrammarKind.REGEX, r"a<\|im_end\|>", "a<|im_end|>"),
    (GrammarKind.REGEX, "é<b><b></s>", "é<b><b></s>"),
    (GrammarKind.REGEX, r"\x3cb>|\u{3c}[b](>)", "<b>"),
    (GrammarKind.REGEX, r"(<){1}b>x", "<b>x"),
    (GrammarKind.JSON_SCHEMA, json.dumps({"const": "1</s>2"}), '"1</s>2"'),
    (GrammarKind.JSON_SCHEMA, r'{"const": "\u003cb>\u00e9"}', '"<b>é"'),
    (GrammarKind.JSON_SCHEMA, json.dumps({"pattern": r"^\x3cb>$", "type": "string"}), '"<b>"'),
    (GrammarKind.LARK, 'start: "<b>" <b> "</b>"', "<b><b></b>"),
    (GrammarKind.LARK, 'start: "<" B /\\x3e/\nB: "b"', "<b>"),
    (GrammarKind.LARK, 'start: "plain"', "plain"),
]


@pytest.mark.parametrize(("kind", "source", "text"), CASES)
def test_the_only_answer_is_written(
    compiler: GrammarCompiler, tokenizer: Tokenizer, kind: GrammarKind, source: str, text: str
) -> None:
    """A draft is right: it is a token that the mask before it allows.

    A worker that takes over after any token has the same masks.
    """
    grammar, eos = Grammar(kind, source), tokenizer.token_to_id("</s>")
    compiler.compile(grammar)
    special = [tokenizer.token_to_id(text) for text in SPECIAL]
    computer = MaskComputer(1, compiler.num_tokens, tokenizer.get_vocab_size(), special)
    state = state_of(compiler, grammar)
    token_ids: list[int] = []
    while True:
        drafts = state.drafts(4, [])
        [mask, *after] = state.masks(drafts)
        rebuilt = state_of(compiler, grammar)
        rebuilt.advance(token_ids)
        assert rebuilt.masks([]) == [mask]
        rows = computer.begin([MaskedRows(0, state, drafts)]).result(10)
        for place, each in enumerate([mask, *after]):
            bits = rows.bits[rows.line(place)].numpy().tobytes()
            assert bits[: len(each)] == each
        assert len(after) == len(drafts)
        allowed = int.from_bytes(mask, "little")
        assert allowed.bit_count() == 1
        token_id = allowed.bit_length() - 1
        assert drafts[:1] in ([], [token_id])
        token_ids.append(token_id)
        state.advance(token_ids)
        assert not state.error
        if token_id == eos:
            break
    assert tokenizer.decode(token_ids[:-1], skip_special_tokens=False) == text
