"""The tokenizers of GGUF files give the ids of the tokenizers that the files were made of.

Byte-level ones are compared with transformers' own classes, and sentencepiece's with the library.
"""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import GGMLQuantizationType as Type
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import (
    CohereTokenizer,
    Gemma2Config,
    GemmaTokenizer,
    GPTNeoXTokenizer,
    LlamaConfig,
    PretrainedConfig,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35_REGEX

from api_proc.text.checkpoint import chat_templates
from api_proc.text.tokenizer import EncodeOptions, HfTokenizer
from scripts.gguf.directory import make_directory
from tests.paths import ROOT
from tests.worker.gguf.gguf_files import WIDE, Vocabulary, write_gguf

LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3_REGEXES = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
KIMI_K2_REGEX = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
SEED_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The patterns as tokenizer.json has them, and as Kimi-K2's own code has them."""
TEXTS = (
    "Hello, world!",
    "  two spaces before, and behind  ",
    "I'll bet it's 12345 times 3.14159 = what?",
    "Tabs\tand\n\nnew\r\nlines\n\n\n   indented",
    "日本語のテキスト、Ελληνικά и русский",
    "e\u0301 and \u00e9 are one letter; 🙂👩‍👩‍👧 are several codes",
    "def add(a, b):\n    return a + b\n",
    "",
    " ",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<think>\nso</think> and <s>not a letter</s>",
    "\u0000\u0007\u200b\u2028odd characters\uffff",
    "a" * 300,
)
CONTROL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
USER_DEFINED = ("<think>", "</think>")
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


def sentences() -> Iterator[str]:
    for name in ("README.md", "docs/models.md", "docs/protocol.md"):
        yield from (ROOT / name).read_text().splitlines()
    yield from TEXTS[:7] * 20


def byte_level(
    parts: Sequence[pre_tokenizers.PreTokenizer],
    *,
    composes: bool,
    takes_whole_words: bool,
    has_begin: bool,
) -> Any:
    """Train a tokenizer as Qwen's or Llama's tokenizer.json describe theirs."""
    tokenizer = Tokenizer(BPE(ignore_merges=takes_whole_words))
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(parts))
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sentences(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in USER_DEFINED])
    if has_begin:
        begin = ("<s>", tokenizer.token_to_id("<s>"))
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[begin])
    return tokenizer


def split_by(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    """Return what splits text by patterns, and then writes bytes as characters."""
    return [
        *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def stored(tokenizer: Tokenizer, pre: str, *, has_begin: bool) -> Vocabulary:
    """Return what a file has of a byte-level tokenizer."""
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    tokens = [by_id[number] for number in range(len(by_id))]
    types = [3 if token in CONTROL else 4 if token in USER_DEFINED else 1 for token in tokens]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    keys = {
        **{"model": "gpt2", "pre": pre, "merges": [" ".join(merge) for merge in merges]},
        **{"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>")},
        **{"add_bos_token": has_begin, "chat_template": TEMPLATE},
    }
    return Vocabulary(tokens, types, keys)


def load(
    vocabulary: Vocabulary,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    config_class: type[PretrainedConfig] = LlamaConfig,
) -> HfTokenizer:
    """Write a file with the vocabulary, and load its tokenizer as the API does."""
    monkeypatch.setattr("scripts.gguf.cache.cache_directory", lambda: directory / "cache")
    config = config_class(**WIDE | {"vocab_size": len(vocabulary.tokens), "num_hidden_layers": 1})
    path, _ = write_gguf(directory, config, Type.F16, vocabulary=vocabulary)
    made = make_directory(path)
    settings = json.loads((made / "tokenizer_config.json").read_text())
    tokenizer = HfTokenizer(made, settings)
    if "chat_template" in vocabulary.keys:
        assert chat_templates(made, settings, None) == {"default": TEMPLATE}
    return tokenizer


def ids(tokenizer: HfTokenizer, text: str, *, special: bool = True) -> Sequence[int]:
    return list(tokenizer.encode(text, EncodeOptions(special, 10_000)))


WORDS, REST = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+", r"\s*[\r\n]+"
JAIS2_SPACES = (
    r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)"
    r"|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)
FURTHER: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "bloom": split_by(" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"),
    "command-r": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "falcon": [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ],
    "jais-2": split_by(
        rf"{WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}|{JAIS2_SPACES}"
    ),
    "minicpm5": split_by(
        r"\p{N}{1,3}",
        rf"{WORDS}|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}|\s+(?!\S)|\s+",
    ),
    "olmo": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "stablelm2": split_by(PRETOKENIZE_REGEX),
}
"""Falcon's, BLOOM's and others are those of their tokenizer.json."""


def test_transformers_composes_texts_of_command_r_and_olmo() -> None:
    """OLMo has the tokenizer of GPT-NeoX."""
    for kind in (CohereTokenizer, GPTNeoXTokenizer):
        assert isinstance(kind().backend_tokenizer.normalizer, normalizers.NFC)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stated", "usual"])
def test_special_tokens_of_sentencepiece_need_not_be_stated(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are 0 to 2 then, as in llama.cpp."""
    vocabulary = stored_pieces(train_sentencepiece())
    names = ("bos_token_id", "eos_token_id", "unknown_token_id")
    assert [vocabulary.keys[name] for name in names] == [1, 2, 0]
    keys = {name: key for name, key in vocabulary.keys.items() if name not in names}
    kept = vocabulary if kind == "stated" else vocabulary._replace(keys=keys)
    found = load(kept, tmp_path, monkeypatch)
    assert ids(found, "a")[0] == 1
    [made] = (tmp_path / "cache").glob("gguf/*/tiny")
    assert json.loads((made / "generation_config.json").read_text())["eos_token_id"] == [2]


@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2", "llama-bpe", "deepseek-v3"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen35", "kimi-k2", *FURTHER)),
        pytest.param("seed-coder", marks=pytest.mark.slow),
    ],
)
def test_byte_level_ids_are_those_of_the_original_tokenizer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_llama = kind == "llama-bpe"
    patterns = {
        **{"llama-bpe": (LLAMA3_REGEX,), "qwen2": (PRETOKENIZE_REGEX,)},
        "deepseek-v3": DEEPSEEK_V3_REGEXES,
        **{"qwen35": (QWEN35_REGEX,), "kimi-k2": (KIMI_K2_REGEX,), "seed-coder": (SEED_REGEX,)},
    }
    original = byte_level(
        FURTHER[kind] if kind in FURTHER else split_by(*patterns[kind]),
        composes=kind in ("qwen2", "qwen35", "command-r", "olmo"),
        takes_whole_words=is_llama or kind == "minicpm5",
        has_begin=is_llama,
    )
    found = load(stored(original, kind, has_begin=is_llama), tmp_path, monkeypatch)
    splits = [one.pre_tokenizer.pre_tokenize_str for one in (found._tokenizer, original)]
    for text in (*TEXTS, "in2024\u5e74x"):
        assert splits[0](text) == splits[1](text), text
        for special in (True, False):
            expected = original.encode(text, add_special_tokens=special).ids
            assert ids(found, text, special=special) == expected, text
            assert found.decode(expected, skip_special_tokens=False) == original.decode(
                expected, skip_special_tokens=False
            )


def train_sentencepiece(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(),
        model_writer=model,
        vocab_size=1000,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def stored_pieces(model: sentencepiece.SentencePieceProcessor, **keys: Any) -> Vocabulary:
    """Return what a file has of a model of sentencepiece."""
    size = model.get_piece_size()
    tokens = [model.id_to_piece(number) for number in range(size)]
    types = [
        2
        if model.is_unknown(number)
        else 3
        if model.is_control(number)
        else 6
        if model.is_byte(number)
        else 1
        for number in range(size)
    ]
    known = {
        **{"model": "llama", "scores": [model.get_score(number) for number in range(size)]},
        **{"bos_token_id": model.bos_id(), "eos_token_id": model.eos_id()},
        **{"unknown_token_id": model.unk_id()},
    }
    return Vocabulary(tokens, types, known | keys)


def reversed_words(vocabulary: Vocabulary) -> Vocabulary:
    """Return the same tokens with those that are words in the opposite order, with their scores."""
    first = vocabulary.types.index(1)
    order = [*range(first), *reversed(range(first, len(vocabulary.tokens)))]
    scores = [vocabulary.keys["scores"][number] for number in order]
    tokens = [vocabulary.tokens[number] for number in order]
    types = [vocabulary.types[number] for number in order]
    return Vocabulary(tokens, types, {**vocabulary.keys, "scores": scores})


def test_scores_rank_the_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = train_sentencepiece()
    found = load(reversed_words(stored_pieces(model)), tmp_path, monkeypatch)
    for text in TEXTS[:7]:
        pieces = [found._tokenizer.id_to_token(number) for number in ids(found, text)]
        assert pieces == ["<s>", *model.encode(text, out_type=str)], text


@pytest.mark.parametrize("has_prefix", [True, False])
def test_ids_are_those_of_sentencepiece(
    has_prefix: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama-2 has a space before each text, and Gemma has none."""
    model = train_sentencepiece(add_dummy_prefix=has_prefix)
    config_class = LlamaConfig if has_prefix else Gemma2Config
    found = load(stored_pieces(model), tmp_path, monkeypatch, config_class)
    for text in TEXTS:
        if "<s>" in text or "\0" in text:  # control tokens, which the library reads as text
            continue
        expected = model.encode(text)
        if text:
            assert ids(found, text, special=False) == expected, text
            assert found.decode(expected, skip_special_tokens=True) == model.decode(expected)
        assert ids(found, text) == [model.bos_id(), *ids(found, text, special=False)]


def test_ids_equal_those_of_gemma_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are those of sentencepiece, and its merges are stated."""
    trained = Tokenizer(BPE(byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    bytes_ = [f"<0x{code:02X}>" for code in range(256)]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *bytes_]
    trainer = BpeTrainer(vocab_size=1200, special_tokens=special, show_progress=False)
    trained.train_from_iterator(sentences(), trainer)
    words, merges = trained.get_vocab(), json.loads(trained.to_str())["model"]["merges"]
    original = GemmaTokenizer(vocab=words, merges=[tuple(merge) for merge in merges])
    tokens = sorted(words, key=lambda token: words[token])
    types = [3, 3, 3, 2, *[6] * 256, *[1] * (len(tokens) - 260)]
    keys = {
        **{"model": "gemma4", "merges": [" ".join(merge) for merge in merges]},
        **{"bos_token_id": 2, "eos_token_id": 1, "padding_token_id": 0, "unknown_token_id": 3},
        "add_space_prefix": False,
    }
    found = load(Vocabulary(tokens, types, keys), tmp_path, monkeypatch, Gemma2Config)
    for text in TEXTS:
        expected = original.encode(text, add_special_tokens=False)
        assert ids(found, text, special=False) == expected, text
        assert ids(found, text) == [2, *expected], text
        assert found.decode(expected, skip_special_tokens=False) == original.decode(expected)
