"""Grammars that demand a text for which the model has no tokens."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from protocol.sampling import Grammar, GrammarKind
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.errors import GrammarError
from worker_proc.grammar.state import GrammarState
from worker_proc.grammar.vocabulary import Vocabulary

NO_TOKEN = "the model has no token for what the grammar demands next"
TOKENS = ["<unk>", "</s>", *"abcdefgh:{}", '"']
"""A byte-level vocabulary from which most bytes were left out, those of é among them."""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    directory: Path = tmp_path_factory.mktemp("characters")
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return GrammarCompiler(Vocabulary([1], str(directory)))


@pytest.mark.parametrize("ending", ["(é|☃)", "é"], ids=["some texts", "one text"])
def test_an_answer_that_no_token_continues_fails_instead_of_ending(
    compiler: GrammarCompiler, ending: str
) -> None:
    """EOS, or a token of the text after that, may be all that the mask allows."""
    grammar = Grammar(GrammarKind.REGEX, f"abcdefg{ending}h")
    compiler.compile(grammar)
    compiler.follow(grammar)
    state = GrammarState(compiler.matcher(grammar), 0)
    outputs: list[int] = []
    for character in "abcdefg":
        [mask] = state.masks([])
        outputs.append(TOKENS.index(character))
        assert int.from_bytes(mask, "little") == 1 << outputs[-1]
        state.advance(outputs)
        assert state.error == ""
    [mask] = state.masks([])
    state.advance([*outputs, int.from_bytes(mask, "little").bit_length() - 1])
    assert state.error in (NO_TOKEN, f"the grammar does not allow token {TOKENS.index('h')}")


@pytest.mark.parametrize("regex", ["abé", "ab(é|☃)h", "abcéh", "éh"])
def test_a_dead_end_within_the_first_tokens_is_refused_before(
    compiler: GrammarCompiler, regex: str
) -> None:
    grammar = Grammar(GrammarKind.REGEX, regex)
    compiler.compile(grammar)
    with pytest.raises(GrammarError, match=f"^{NO_TOKEN}$"):
        compiler.follow(grammar)
