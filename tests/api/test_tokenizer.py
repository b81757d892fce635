"""Token ids and rendered chats are those of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, models

from api_proc.bodies import ChatBody, CompletionBody, SamplingBody
from api_proc.errors import ApiError
from api_proc.llm import SamplingParams as PythonParams
from api_proc.llm.sampling import resolved, with_defaults
from api_proc.params import (
    MAX_BAD_TOKENS,
    bad_word_ids,
    resolve_max_tokens,
    sampling_params,
)
from api_proc.text.chat_template import ChatTemplate, ChatTemplateError
from api_proc.text.checkpoint import (
    SamplingDefaults,
    chat_templates,
    read_json,
    sampling_defaults,
)
from api_proc.text.processor import TextProcessor
from api_proc.text.tokenizer import ByteTokenizer, EncodeOptions, HfTokenizer, TooManyTokens
from protocol.config import ConfigError, ModelConfig
from protocol.config.settings import configure
from tests.api.conftest import CORPUS, write_json
from tests.paths import DEMO_MODEL
from worker_proc.startup.start import null_facts

TEXTS = [*CORPUS[:3], "", " ", "<s>special</s> <|im_start|>", "tab\tnew\nline\r\n", "x" * 300]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    [
        {"role": "system", "content": "  Be brief. "},
        {"role": "user", "content": "1 < 2 & 'quoted'"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "日本\n"},
    ],
]
TEMPLATES = {
    "lists": "{{ bos_token }}{% for m in messages %}\n    [{{ loop.index }}] {{ m | tojson }}\n"
    "{% endfor %}{{ messages | tojson(indent=2) }}",
    "control": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
    "{{ m['content'] }}{% endfor %}{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}{{ eos_token }}",
    "date": "{{ strftime_now('%Y') }}{{ add_generation_prompt }}{{ tools is none }}",
}


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(checkpoint))


def load(directory: Path) -> HfTokenizer:
    return HfTokenizer(directory, read_json(directory / "tokenizer_config.json"))


def with_config(checkpoint: Path, directory: Path, **fields: Any) -> Path:
    copy = directory / "copy"
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    write_json(copy / "tokenizer_config.json", config | fields)
    return copy


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_ids_equal_transformers(
    checkpoint: Path, reference: Any, text: str, add_special_tokens: bool
) -> None:
    ids = load(checkpoint).encode(text, EncodeOptions(add_special_tokens, 10_000))
    assert ids == reference.encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True},
    ],
)
def test_tokenizer_json_decides_on_added_ends_as_in_transformers(
    checkpoint: Path, tmp_path: Path, fields: dict[str, bool]
) -> None:
    transformers = pytest.importorskip("transformers")
    directory = with_config(checkpoint, tmp_path, **fields)
    ids = load(directory).encode("hello", EncodeOptions(True, 100))
    assert ids == transformers.AutoTokenizer.from_pretrained(str(directory)).encode("hello")


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_checkpoint_template_renders_like_transformers(
    checkpoint: Path, reference: Any, messages: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    template = TextProcessor.load(configure(model=str(checkpoint)).model).template
    assert template is not None
    assert template.render(
        messages, add_generation_prompt=add_generation_prompt
    ) == reference.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
def test_template_features_render_like_transformers(
    reference: Any, name: str, messages: list[dict[str, Any]]
) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    assert ChatTemplate(TEMPLATES[name], special).render(messages) == reference.apply_chat_template(
        messages, chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=True
    )


def test_template_sources_in_order_of_precedence(checkpoint: Path, tmp_path: Path) -> None:
    directory = with_config(
        checkpoint,
        tmp_path,
        chat_template=[
            {"name": "default", "template": "from config"},
            {"name": "rag", "template": "from config"},
        ],
    )

    def names() -> dict[str, str]:
        return chat_templates(directory, read_json(directory / "tokenizer_config.json"), None)

    assert names() == {"default": "from config", "rag": "from config"}
    write_json(directory / "chat_template.json", {"chat_template": "from json"})
    assert names()["default"] == "from json"
    (directory / "chat_template.jinja").write_text("from jinja")
    assert names()["default"] == "from jinja"
    override = tmp_path / "mine.jinja"
    override.write_text("mine")
    assert chat_templates(directory, {}, str(override)) == {"default": "mine"}
    with pytest.raises(ConfigError, match="chat_template"):
        chat_templates(directory, {}, str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[7].content.x }}", "no element 7"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
    ],
)
def test_template_that_raises_is_an_error_of_the_request(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}).render(CHATS[0])


def test_invalid_template_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("\n{% if %}", {})


def test_long_text_is_rejected_or_truncated(checkpoint: Path) -> None:
    tokenizer = load(checkpoint)
    ids = tokenizer.encode("a b c d", EncodeOptions(False, 100))
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode("a b c d", EncodeOptions(False, len(ids) - 1))
    assert caught.value.num_tokens == len(ids)
    cut = tokenizer.encode("a b c d", EncodeOptions(False, 2, 2))
    assert cut == ids[-2:]


SPACE_PIECES = {"▁": 1, "▁▁": 2, "<0x0A>": 3, "<0x41>": 4, "\n": 5, "▁a": 6, "20": 7, "\u3000": 8}


def test_tokens_of_white_space_are_known(checkpoint: Path, tmp_path: Path) -> None:
    """The vocabulary may be byte-level, have pieces with marks for spaces, or added tokens."""
    demo = DEMO_MODEL
    pieces = Tokenizer(models.WordLevel({"<unk>": 0} | SPACE_PIECES, unk_token="<unk>"))
    pieces.add_tokens([AddedToken("    "), AddedToken("<think>")])
    pieces.save(str(tmp_path / "tokenizer.json"))
    found = {}
    for directory in (checkpoint, demo, tmp_path):
        tokenizer = HfTokenizer(directory, {})
        ids = tokenizer._tokenizer.get_vocab().values()
        known = {i: tokenizer.token_bytes(i) for i in tokenizer.space_token_ids}
        assert known == {i: tokenizer.token_bytes(i) for i in ids if i in known}
        assert [i for i in ids if not tokenizer.token_bytes(i).strip() and i not in known] == []
        found[directory] = tokenizer.space_token_ids
    assert len(found[demo]) > 20
    assert found[tmp_path] == [1, 2, 3, 5, pieces.token_to_id("    ")]


def test_missing_tokenizer_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TextProcessor.load(configure(model=str(tmp_path)).model)


def test_sampling_defaults_come_from_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    defaults = sampling_defaults(ModelConfig(model=str(checkpoint)))
    assert (defaults.temperature, defaults.top_k) == (0.25, 7)
    write_json(tmp_path / "generation_config.json", {"temperature": -1, "top_p": 0.5})
    defaults = sampling_defaults(ModelConfig(model=str(tmp_path)))
    assert (defaults.temperature, defaults.top_p) == (1.0, 0.5)


def test_settings_take_the_place_of_the_checkpoints_sampling_defaults(tmp_path: Path) -> None:
    content = {"temperature": 0.25, "top_k": 7, "suppress_tokens": [5]}
    write_json(tmp_path / "generation_config.json", content)

    def found(**settings: object) -> dict[str, Any]:
        model = configure(model=str(tmp_path), **settings).model
        return msgspec.structs.asdict(sampling_defaults(model))

    neutral = msgspec.structs.asdict(SamplingDefaults(suppress_tokens=[5]))
    overrides = {"temperature": 0.0, "min_p": 0.1}
    assert found() == neutral | {"temperature": 0.25, "top_k": 7}
    assert found(override_generation_config=overrides) == neutral | overrides | {"top_k": 7}
    assert found(generation_config="vllm") == neutral
    assert found(generation_config="vllm", override_generation_config=overrides) == (
        neutral | overrides
    )


def test_settings_of_the_null_model_are_its_sampling_defaults() -> None:
    model = configure(model="null", override_generation_config={"max_new_tokens": 8}).model
    text = TextProcessor.load(model)
    assert text.defaults == SamplingDefaults(max_new_tokens=8, max_tokens_limit=8)
    text.close()


def test_max_new_tokens_is_a_default_of_the_checkpoint_and_a_limit_of_the_settings(
    tmp_path: Path,
) -> None:
    """As in vLLM. Completions have a default anyway."""
    write_json(tmp_path / "generation_config.json", {"max_new_tokens": 20, "max_tokens_limit": 1})
    facts = msgspec.structs.replace(null_facts(configure(model="null")), max_model_len=100)

    def limit_of(body: SamplingBody, **settings: Any) -> int:
        model = configure(model=str(tmp_path), **settings).model
        return resolve_max_tokens(body, sampling_defaults(model), facts, 10)

    bound: dict[str, Any] = {"override_generation_config": {"max_new_tokens": 8}}
    chat = ChatBody(messages=[])
    assert limit_of(chat) == 20
    assert limit_of(chat, generation_config="vllm") == 90
    assert limit_of(chat, **bound) == 8
    assert limit_of(ChatBody(messages=[], max_tokens=50)) == 50
    assert limit_of(ChatBody(messages=[], max_completion_tokens=50), **bound) == 8
    assert limit_of(ChatBody(messages=[], max_tokens=5), **bound) == 5
    assert limit_of(CompletionBody(prompt="a")) == 16
    assert limit_of(CompletionBody(prompt="a"), **bound) == 8
    model = configure(model=str(tmp_path)).model
    assert with_defaults(sampling_defaults(model)).max_tokens == 20


def test_suppressed_tokens_of_the_checkpoint_are_banned(tmp_path: Path) -> None:
    """Ids outside the vocabulary are not, nor any in requests that state which tokens may be."""
    write_json(tmp_path / "generation_config.json", {"suppress_tokens": [5, 7, 1000]})
    defaults = sampling_defaults(ModelConfig(model=str(tmp_path)))
    for allowed, expected in ((None, [[9, 8], [5], [7]]), ([5, 6], [[9, 8]])):
        body = CompletionBody(model="", prompt="a", allowed_token_ids=allowed)
        params = sampling_params(
            body, defaults, max_tokens=1, seed=0, vocab_size=1000, bad_words=[[9, 8]]
        )
        assert params.bad_words == expected
        same = PythonParams(bad_words=["\x01"], allowed_token_ids=allowed)
        facts = msgspec.structs.replace(null_facts(configure(model="null")), vocab_size=1000)
        tokenizer = ByteTokenizer()
        [word] = bad_word_ids(["\x01"], tokenizer)
        params = resolved(same, facts, tokenizer, 1, defaults=defaults, seed=0, index=0)
        assert params.bad_words == [word, *expected[1:]]
    assert with_defaults(defaults) == PythonParams()


def test_the_tokens_of_bad_words_are_bounded() -> None:
    """The bound is on all of them, with those after a space; their number is bounded as well."""
    tokenizer = ByteTokenizer()
    word = "\x01" * 256
    num_each = sum(map(len, bad_word_ids([word], tokenizer)))
    count = MAX_BAD_TOKENS // num_each
    assert count < 128
    assert len(bad_word_ids([word] * count, tokenizer)) >= count
    with pytest.raises(ApiError, match=r"^bad_words: have more than 4096 tokens"):
        bad_word_ids([word] * (count + 1), tokenizer)
    with pytest.raises(ApiError, match=r"^bad_words: have a word of 1025 tokens, more than 1024"):
        bad_word_ids(["\U0001f600" * 256], tokenizer)  # 1,024 bytes after a space
