"""How byte-level tokenizers split text into words, by `tokenizer.ggml.pre`.

The patterns are those of the tokenizer.json of the models that the names stand for.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIXES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
LLAMA3 = rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}|{_REST}"
QWEN35 = (
    rf"{_SUFFIXES}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED_CODER = (
    rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_NOT_HAN_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_NOT_HAN_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
KIMI_K2 = (
    rf"[\p{{Han}}]+|{_BEFORE}{_NOT_HAN_LETTERS}*{_NOT_HAN_SMALL}+{_SUFFIXES}?"
    rf"|{_BEFORE}{_NOT_HAN_LETTERS}+{_NOT_HAN_SMALL}*{_SUFFIXES}?|\p{{N}}{{1,3}}|{_REST}"
)
GPT4O = (
    rf"{_BEFORE}{_LETTERS}*{_SMALL}+{_SUFFIXES}?|{_BEFORE}{_LETTERS}+{_SMALL}*{_SUFFIXES}?"
    rf"|\p{{N}}{{1,3}}|{_REST_WITH_SLASHES}"
)
TEKKEN = (
    rf"{_BEFORE}{_LETTERS}*{_SMALL}+|{_BEFORE}{_LETTERS}+{_SMALL}*"
    rf"|\p{{N}}|{_REST_WITH_SLASHES}"
)
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_WIDE_SPACES = "|".join(
    rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")
)
JAIS2 = (
    rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
    rf"|{_WIDE_SPACES}|\s"
)
MINICPM5 = rf"{_SUFFIXES}|{_BEFORE}\p{{L}}+|\p{{N}}+|{_REST}"
EXAONE_MOE = (
    rf"{_SUFFIXES}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
TINY_AYA_FIRST = r"\d{1,3}(?=(?:\d{3})*\b)"
DEEPSEEK_CODER_FIRST = (
    *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+"),
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)
DEEPSEEK_V3_FIRST = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+")
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Split(NamedTuple):
    """How text is normalized and split."""

    pattern: str = ""
    """The pattern of words; empty: that of GPT-2."""
    parts: tuple[pre_tokenizers.PreTokenizer, ...] = ()
    """Steps that split text, used instead of a pattern."""
    first: tuple[str, ...] = ()
    """Patterns whose finds are split off before, one pattern after the other."""
    has_single_digits: bool = False
    """Whether digits are split before GPT-2's pattern is used."""
    composes: bool = False
    """Whether characters are composed first (NFC)."""
    takes_whole_words: bool = False
    """Whether a word that is a token is one, whatever its merges give."""
    has_begin: bool = False
    """Whether a text begins with the BOS token if the file does not state that."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if self.parts:
            return pre_tokenizers.Sequence(list(self.parts))
        if self.pattern:
            patterns = (*self.first, self.pattern)
            parts = [
                *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
            return pre_tokenizers.Sequence(parts)
        bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if not self.has_single_digits:
            return bytes_of_words
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, bytes_of_words])


_GPT2 = Split()
_GPT2_COMPOSED = Split(composes=True)
_FALCON = Split(
    parts=(
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    )
)
_SINGLE_DIGITS = Split(has_single_digits=True)
_WITH_LLAMA3 = Split(LLAMA3, takes_whole_words=True, has_begin=True)
_WITH_QWEN2 = Split(QWEN2, composes=True)
_WITH_GPT4O = Split(GPT4O)
_WITH_DEEPSEEK_V3 = Split(DEEPSEEK_V3, first=DEEPSEEK_V3_FIRST)
BYTE_LEVEL: Mapping[str, Split] = {
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4"), _GPT2),
    **dict.fromkeys(("jais", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _SINGLE_DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "lfm2"), _WITH_LLAMA3),
    **dict.fromkeys(("pixtral", "falcon-h1", "midm-2.0"), _WITH_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Split(LLAMA3)),
    **dict.fromkeys(("glm4", "glm5"), Split(LLAMA3, takes_whole_words=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), _WITH_QWEN2),
    "hunyuan": Split(QWEN2),
    "qwen35": Split(QWEN35, composes=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _WITH_GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _WITH_DEEPSEEK_V3),
    "deepseek-coder": Split(r"\p{N}", first=DEEPSEEK_CODER_FIRST),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Split(BAILING)),
    "seed-coder": Split(SEED_CODER),
    "kimi-k2": Split(KIMI_K2),
    **dict.fromkeys(("mpt", "olmo"), _GPT2_COMPOSED),
    "command-r": Split(has_single_digits=True, composes=True),
    "falcon": _FALCON,
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Split(BLOOM)),
    "viking": Split(r"\p{N}", first=(BLOOM,)),
    "stablelm2": Split(QWEN2),
    "jais-2": Split(JAIS2),
    "minicpm5": Split(MINICPM5, first=(r"\p{N}{1,3}",), takes_whole_words=True),
    "exaone-moe": Split(EXAONE_MOE),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), Split(GPT4O, first=(TINY_AYA_FIRST,))),
    "tekken": Split(TEKKEN, takes_whole_words=True, has_begin=True),
}
"""The splits by the names that llama.cpp gives to tokenizers."""
