"""The texts of single tokens add up to the text of all tokens together."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from api_proc.text.checkpoint import read_json
from api_proc.text.detokenizer import MAX_PENDING_TOKENS, StreamDetokenizer
from api_proc.text.tokenizer import (
    FIRST_BYTE_ID,
    ByteTokenizer,
    EncodeOptions,
    HfTokenizer,
    TextTokenizer,
)
from tests.api.conftest import write_json

TEXTS = [
    "plain ascii",
    "日本語のテキスト",
    "family 👩‍👩‍👧 and flag 🇩🇪🙂🎉",
    "a\u0301 combining, ünïcödé",
    " leading and trailing ",
]
SHARED = settings(suppress_health_check=list(HealthCheck), max_examples=50)


@pytest.fixture(scope="module")
def byte_level(checkpoint: Path) -> HfTokenizer:
    return HfTokenizer(checkpoint, read_json(checkpoint / "tokenizer_config.json"))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    """SentencePiece's way: spaces as a block character, unknown characters as bytes."""
    vocabulary = {"<unk>": 0}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abcdefghijklmnop,"):
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    directory = tmp_path_factory.mktemp("fallback")
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", {"unk_token": "<unk>"})
    return HfTokenizer(directory, {"unk_token": "<unk>"})


def ids_of(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, EncodeOptions(False, 10_000))


def stream(tokenizer: TextTokenizer, prompt: list[int], output: list[int]) -> str:
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=True)
    return "".join([detokenizer.push([i]) for i in output]) + detokenizer.flush()


@pytest.mark.parametrize("text", TEXTS)
def test_output_after_a_prompt_continues_it(byte_level: HfTokenizer, text: str) -> None:
    ids = ids_of(byte_level, text)
    for cut in range(len(ids)):
        whole_characters = byte_level.decode(ids[:cut], skip_special_tokens=True)
        if "\ufffd" not in whole_characters:
            assert whole_characters + stream(byte_level, ids[:cut], ids[cut:]) == text


@given(st.lists(st.integers(0, 399), max_size=40), st.data())
@SHARED
def test_any_tokens_in_any_pieces_give_the_full_decoding(
    byte_level: HfTokenizer, ids: list[int], data: st.DataObject
) -> None:
    """The bytes may be invalid as UTF-8, or end within a character."""
    expected = byte_level.decode(ids, skip_special_tokens=True)
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = byte_level.detokenizer([], skip_special_tokens=True)
    pieces = [detokenizer.push(ids[:cut]), detokenizer.push(ids[cut:]), detokenizer.flush()]
    assert "".join(pieces) == expected
    assert stream(byte_level, [], ids) == expected


def test_incomplete_character_at_the_end_shows_as_replacement(byte_level: HfTokenizer) -> None:
    ids = ids_of(byte_level, "smile 🙂")[:-1]
    assert stream(byte_level, [], ids) == byte_level.decode(ids, skip_special_tokens=True)
    assert stream(byte_level, [], ids).endswith("\ufffd")


def test_prompt_may_end_within_a_character(byte_level: HfTokenizer) -> None:
    ids = ids_of(byte_level, "smile 🙂 ok")
    cut = next(
        i
        for i in range(len(ids))
        if "\ufffd" in byte_level.decode(ids[: i + 1], skip_special_tokens=True)
    )
    assert stream(byte_level, ids[: cut + 1], ids[cut + 1 :]) == "🙂 ok"


def test_special_tokens_are_hidden_by_default(byte_level: HfTokenizer) -> None:
    shown = byte_level.detokenizer([], skip_special_tokens=False)
    assert shown.push([2, 1]) == "<|im_start|></s>"
    hidden = byte_level.detokenizer([], skip_special_tokens=True)
    assert hidden.push([2, 1]) == ""


def test_unknown_ids_have_no_text(byte_level: HfTokenizer) -> None:
    assert stream(byte_level, [], [5_000_000]) == ""


@pytest.mark.parametrize("text", ["abc, 日本 def", "🙂 a", "plain", "ende🎉"])
def test_byte_fallback_vocabulary_streams_whole_characters(
    byte_fallback: HfTokenizer, text: str
) -> None:
    prompt, output = ids_of(byte_fallback, "a b"), ids_of(byte_fallback, text)
    assert isinstance(byte_fallback.detokenizer([], skip_special_tokens=True), StreamDetokenizer)
    expected = byte_fallback.decode(prompt + output, skip_special_tokens=True)
    assert "a b" + stream(byte_fallback, prompt, output) == expected


def test_byte_fallback_ends_within_a_character(byte_fallback: HfTokenizer) -> None:
    output = ids_of(byte_fallback, "a🙂")[:-1]
    text = stream(byte_fallback, ids_of(byte_fallback, "b"), output)
    assert text.startswith(" a")
    assert text.endswith("\ufffd")


@given(st.lists(st.sampled_from(["a", "p", "日", "🙂", "\udc80", "\udce6"]), max_size=12))
@SHARED
def test_invalid_bytes_lose_no_other_text(byte_fallback: HfTokenizer, output: list[str]) -> None:
    """A run of bytes with an invalid one is replaced as a whole, also what was shown of it."""
    plain = {letter: ids_of(byte_fallback, letter)[1:] for letter in "ap"}
    ids = [
        token_id
        for character in output
        for token_id in plain.get(character)
        or [1 + byte for byte in character.encode(errors="surrogateescape")]
    ]
    text = stream(byte_fallback, ids_of(byte_fallback, "b"), ids)
    assert [i for i in output if i in plain] == [c for c in text if c.isascii()]


def test_byte_fallback_prompt_ends_within_a_character(byte_fallback: HfTokenizer) -> None:
    text = "ab🙂c"
    ids = ids_of(byte_fallback, text)
    for cut in range(2, len(ids)):
        whole_characters = byte_fallback.decode(ids[:cut], skip_special_tokens=True).rstrip(
            "\ufffd"
        )
        assert whole_characters + stream(byte_fallback, ids[:cut], ids[cut:]) == text


def test_bytes_that_never_become_text_are_shown_after_a_bound(byte_fallback: HfTokenizer) -> None:
    detokenizer = byte_fallback.detokenizer(ids_of(byte_fallback, "a"), skip_special_tokens=True)
    continuation_byte = 1 + 0x80
    text = detokenizer.push([continuation_byte] * 200)
    assert len(text) >= 200 - 2 * MAX_PENDING_TOKENS
    assert set(text) == {"\ufffd"}


def test_byte_tokenizer_shows_every_id() -> None:
    tokenizer = ByteTokenizer()
    ids = [*ids_of(tokenizer, "é"), 0, 259]
    assert stream(tokenizer, [], ids) == "é<0><259>"
    assert ids[:2] == [FIRST_BYTE_ID + 0xC3, FIRST_BYTE_ID + 0xA9]
