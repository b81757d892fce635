"""Settings: one struct, four sources, and errors that name the setting and its bound."""

import argparse
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from protocol.config import ConfigError, Dtype, EngineConfig, validate_api_port
from protocol.config.foreign_flags import INSTEAD
from protocol.config.generation_overrides import GenerationOverrides
from protocol.config.setting_fields import all_settings, descriptions, flag_of
from protocol.config.settings import add_flags, configure, hint, parse_args, resolve

ALONE = {"data_parallel_size": 0, "agents_listen": "10.0.0.1:7100", "curve_keys": "keys"}
"""An engine without a replica on its own machine."""


def parse(*argv: str) -> EngineConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser)
    return parse_args(parser, argv)


def test_without_flags_all_settings_have_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "__defaults__", (None, ()))  # no GPU
    assert parse() == EngineConfig()


def test_a_gpu_computes_larger_steps(tmp_path: Path) -> None:
    """Configured sizes stay, as do those of a model that is computed elsewhere."""

    def sizes(**values: object) -> tuple[int, int]:
        scheduler = resolve({"model": "demo"} | values, {}, gpu_nodes=nodes).scheduler
        return scheduler.max_num_seqs, scheduler.max_num_batched_tokens

    nodes = [str(tmp_path / "nvidiactl")]
    assert sizes() == sizes(device="cpu") == (64, 2048)
    assert sizes(device="cuda") == (256, 8192)
    (tmp_path / "nvidiactl").touch()
    assert sizes() == (256, 8192)
    assert sizes(max_num_seqs=64) == (64, 8192)
    assert sizes(max_num_batched_tokens=100) == (100, 100)
    assert sizes(device="cpu") == sizes(model="null") == (64, 2048)


def test_every_setting_has_a_flag_and_a_description() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    shown = parser.format_help()
    texts = descriptions()
    for setting in all_settings():
        assert setting.flag in shown
        assert texts[setting.name], setting.name


def test_what_the_supervisor_notes_is_not_a_setting() -> None:
    assert "given_model" not in {setting.name for setting in all_settings()}
    with pytest.raises(ConfigError, match="unknown setting given_model"):
        resolve({"given_model": "demo"}, {})


@pytest.mark.parametrize(
    ("variable", "complaint"),
    [
        ("TROIKA_PROT", "unknown variable TROIKA_PROT; did you mean TROIKA_PORT?"),
        ("TROIKA_NOTHING", "unknown variable TROIKA_NOTHING"),
    ],
)
def test_an_unknown_variable_is_named_as_it_was_written(variable: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({}, {variable: "1"})
    assert str(caught.value) == complaint


def test_an_error_about_yaml_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("port: [1\n")
    with pytest.raises(ConfigError, match=r"engine\.yaml is not valid YAML: .*line 1") as caught:
        resolve({}, {}, str(file))
    assert "\n" not in str(caught.value)
    assert "byte string" not in str(caught.value)


def test_names_are_unique_over_all_sections() -> None:
    names = [setting.name for setting in all_settings()]
    assert len(names) == len(set(names))


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max-num-seqs: 3\nport: 3\nblock_size: 3\n")
    environ = {"TROIKA_MAX_NUM_SEQS": "2", "TROIKA_PORT": "2", "OTHER": "x"}
    config = resolve({"max_num_seqs": "1"}, environ, str(file))
    assert config.scheduler.max_num_seqs == 1
    assert config.api.port == 2
    assert config.cache.block_size == 3
    assert config.cache.gpu_memory_utilization == 0.9


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"max_num_seqs": 0}, "^max_num_seqs.*>= 1.*got 0"),
        ({"max_num_seqs": "many"}, "^max_num_seqs: 'many' is not a whole number"),
        ({"port": 65536}, "^port.*65535"),
        ({"dtype": "int3"}, "^dtype.*int3"),
        ({"max_num_sequences": 1}, "did you mean max_num_seqs"),
        ({"max_model_len": 1}, "^max_model_len.*>= 2"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "at least max_num_seqs 16"),
        ({"max_num_scheduled_tokens": 2049}, "at most max_num_batched_tokens 2048"),
        ({"enable_kv_events": True, "enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"max_model_len": 10, "long_prefill_token_threshold": 20}, "at most max_model_len 10"),
        *[
            (
                {"model": "m", "pipeline_parallel_size": 2} | one,
                f"{next(reversed(one))}.*pipeline_parallel_size above 1|"
                f"pipeline_parallel_size above 1.*{next(reversed(one))}",
            )
            for one in (
                {"device": "cuda"},
                {"target_itl_ms": 9},
            )
        ],
        ({"max_num_batched_tokens": None}, "must have a value"),
        ({"scheduling_policy": "lifo"}, "^scheduling_policy.*fcfs"),
        ({"victim_choice": "random"}, "^victim_choice.*cheapest"),
        ({"max_long_partial_prefills": 1}, "needs a long_prefill_token_threshold"),
        (
            {
                "max_num_partial_prefills": 1,
                "max_long_partial_prefills": 2,
                "long_prefill_token_threshold": 8,
            },
            "at most max_num_partial_prefills 1",
        ),
        ({"preempt_for_priority": True}, "needs scheduling_policy priority"),
        ({"target_itl_ms": 9, "enable_chunked_prefill": False}, "needs enable_chunked_prefill"),
        ({"target_itl_ms": 9, "elastic_token_budget": True}, "without elastic_token_budget"),
        ({"model": "m", "speculative_model": "d"}, "needs num_speculative_tokens of at least 1"),
        (
            {"speculative_model": "d", "num_speculative_tokens": 2, "model": "null"},
            "not with the null model",
        ),
        ({"enable_lora": True, "device": "cuda"}, "enable_lora needs device cpu"),
        ({"enable_lora": True, "dtype": "float16"}, "needs dtype float32 or bfloat16"),
        (
            {"default_chat_template_kwargs": "enable_thinking=false"},
            "^default_chat_template_kwargs: 'enable_thinking=false' is not valid JSON: ",
        ),
        (
            {"default_chat_template_kwargs": '{"a": "\udcff"}'},  # a shell can pass any byte
            "^default_chat_template_kwargs: .* is not valid JSON: 'utf-8' codec can't encode",
        ),
        (
            {"default_chat_template_kwargs": "[]"},
            r"^default_chat_template_kwargs: '\[\]' must be an object, got an array$",
        ),
        ({"default_chat_template_kwargs": {"messages": []}}, "messages is set by the server"),
        (
            {"default_chat_template_kwargs": {"a": [{"b": date(2026, 1, 2)}]}},
            r"^default_chat_template_kwargs: a\[0\].b is a date, which JSON lacks; write it as",
        ),
        (
            {"default_chat_template_kwargs": {"a": float("nan")}},
            "^default_chat_template_kwargs: a is nan, which JSON lacks; write it as text",
        ),
        (
            {"default_chat_template_kwargs": {"a": {1: 2}}},
            "^default_chat_template_kwargs: a has the name 1, which is not a text",
        ),
        (
            {"default_chat_template_kwargs": '{"a": [18446744073709551616]}'},
            r"^default_chat_template_kwargs: a\[0\] has more than 64 bits; write it as text",
        ),
        (
            {"default_chat_template_kwargs": {"a": -(2**63) - 1}},
            "^default_chat_template_kwargs: a has more than 64 bits",
        ),
        (
            {"override_generation_config": '{"temperature": 9}'},
            "^override_generation_config: temperature: .*<= 2",
        ),
        (
            {"override_generation_config": '{"temperature": "0.5"}'},
            "^override_generation_config: temperature: must be a number",
        ),
        (
            {"override_generation_config": {"max_length": 9}},
            "^override_generation_config: max_length: is not a known field",
        ),
        ({"tenant_weights": "gold=4"}, "needs scheduling_policy fair"),
        ({"tenant_weights": "gold"}, "^tenant_weights.*'gold' is not name=value"),
        ({"tenant_weights": "gold=1,gold=2"}, "^tenant_weights.*'gold=2' comes twice"),
        ({"tenant_weights": "gold=0"}, "^tenant_weights.*>= 1e-06"),
        ({"tenant_weights": {"gold": "4"}}, "^tenant_weights.*must be a number"),
        ({"tenant_weights": "x" * 257 + "=1"}, "^tenant_weights.*<= 256"),
        ({"swap_space_bytes": -1}, "^swap_space_bytes.*>= 0"),
        ({"data_parallel_size": 0}, "data_parallel_size 0 needs agents_listen, replica_file or"),
        ({"agents_listen": "10.0.0.1:7100"}, "agents_listen needs curve_keys"),
        ({"agents_listen": "7100"}, "^agents_listen"),
        ({"replica_file": "replicas"}, "replica_file needs curve_keys"),
        ({"kv_listen": "10.0.0.1:7300", "kv_offload_bytes": 1}, "kv_listen needs curve_keys"),
        (
            {
                "core_listen": "10.0.0.1:7300",
                "data_parallel_size": 2,
                "kv_listen": "*:7301",
                "kv_offload_bytes": 1,
                "curve_keys": "keys",
            },
            "core_listen and kv_listen must differ: both would listen at port 7301",
        ),
        ({"kv_listen": "10.0.0.1:7300", "curve_keys": "keys"}, "kv_listen needs kv_offload_bytes"),
        ({"ray": "auto"}, "ray needs agents_listen"),
        ({"replicas": 2}, "replicas and max_replicas need ray"),
        *[
            (
                {"ray": "auto", "agents_listen": f"{host}:7100", "curve_keys": "keys"},
                "agents_listen .*:7100 needs the address of this machine with ray",
            )
            for host in ("0.0.0.0", "*")
        ],
        ({"ray": "auto", "ray_cpus": 0.0, **ALONE}, "ray_cpus 0 needs ray_gpus"),
        (
            {"worker_cpus": "0:1", **ALONE},
            "worker_cpus must have a list of CPUs for each worker: 1, not 2",
        ),
        ({"replicas": 3, "max_replicas": 2}, "replicas 3 must be min_replicas 3 to max_replicas 2"),
        ({"ray": "", "replicas": 2}, "^ray"),
        (
            {"core_listen": "*:65535", "curve_keys": "keys", "data_parallel_size": 2},
            "core_listen .*:65535 leaves no ports for all of data_parallel_size 2",
        ),
    ],
)
def test_bad_value_is_named_with_its_bound(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        configure(**values)


def test_rules_name_settings_as_the_user_has(tmp_path: Path) -> None:
    """A rule names flags, variables or keys; one not given is a key only if all others are."""
    file = tmp_path / "engine.yaml"

    def complaint(content: str = "", *, environ: dict[str, str] | None = None, **flags: Any) -> str:
        file.write_text(content)
        with pytest.raises(ConfigError) as caught:
            resolve(flags, environ or {}, str(file))
        return str(caught.value)

    assert complaint("max-num-seqs: 16\n", max_num_batched_tokens="8") == (
        "--max-num-batched-tokens 8 must be at least max-num-seqs 16"
    )
    assert complaint("tenant_weights: a=1\n") == "tenant_weights needs scheduling_policy fair"
    assert complaint("tenant-weights: a=1\n") == "tenant-weights needs scheduling-policy fair"
    assert complaint(environ={"TROIKA_TENANT_WEIGHTS": "a=1"}) == (
        "TROIKA_TENANT_WEIGHTS needs --scheduling-policy fair"
    )
    assert complaint("port: 5\n", tenant_weights="a=1") == (
        "--tenant-weights needs --scheduling-policy fair"
    )
    with pytest.raises(ConfigError, match=r"^tenant_weights needs scheduling_policy fair"):
        configure(tenant_weights="a=1")


def test_a_setting_comes_once_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    for content, complaint in (
        ("port: 1\nseed: 2\nport: 1\n", f"{file} has port twice"),
        ("max-num-seqs: 1\n'max-num-seqs' : 2\n", f"{file} has max-num-seqs twice"),
        (
            "max-num-seqs: 1\nmax_num_seqs: 1\n",
            f"max-num-seqs and max_num_seqs in {file} are the same setting",
        ),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError) as caught:
            resolve({}, {}, str(file))
        assert str(caught.value) == complaint
    file.write_text("# port: 1\nport: 1\ntenant_weights:\n  port: 1\nscheduling_policy: fair\n")
    assert resolve({}, {}, str(file)).api.port == 1


@pytest.mark.parametrize("content", ["- 1\n", "port: [", "prot: 1\n"])
def test_bad_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"engine\.yaml"):
        resolve({}, {}, str(file))


def test_only_an_engine_with_an_api_needs_its_port() -> None:
    config = configure(agents_listen="127.0.0.1:8000", curve_keys="keys")
    with pytest.raises(ConfigError, match="port and agents_listen must differ"):
        validate_api_port(config)
    validate_api_port(configure(agents_listen="127.0.0.1:8001", curve_keys="keys"))


def test_the_null_model_needs_quotes_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("model: null\n")
    with pytest.raises(ConfigError, match="must have a value; the word null needs quotes"):
        resolve({}, {}, str(file))
    file.write_text("port: null\n")
    with pytest.raises(ConfigError, match=r"must have a value$"):
        resolve({}, {}, str(file))
    file.write_text('model: "null"\n')
    assert resolve({}, {}, str(file)).model.model == "null"


def test_unknown_flag_ends_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--max-num-sequs", "3")
    assert caught.value.code == 2
    assert "did you mean --max-num-seqs?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "number"),
    [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("4M", 4 * 2**20), ("8192", 8192)],
)
def test_numbers_may_have_a_unit(text: str, number: int) -> None:
    assert parse("--max-model-len", text).model.max_model_len == number
    assert resolve({}, {"TROIKA_MAX_MODEL_LEN": text}).model.max_model_len == number
    assert configure(max_model_len=text).model.max_model_len == number


@pytest.mark.parametrize("text", ["maybe", "yes", "2", ""])
def test_what_is_neither_true_nor_false_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"'{text}' is not true, false, 1 or 0"):
        resolve({}, {"TROIKA_ENABLE_LORA": text})


@pytest.mark.parametrize("text", ["k", "1.0001k", "8kk", "8 kB", "-1k", "1e3k", "8x"])
def test_a_wrong_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"'{text}' is not a whole number"):
        configure(max_model_len=text)


@pytest.mark.parametrize("value", ["auto", "-1"])
def test_the_length_that_is_chosen_by_vllm_has_an_explanation(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("--max-model-len", value)
    instead = "without it the length is what the KV cache holds, up to that in config.json"
    assert capsys.readouterr().err.endswith(f"{instead}\n")


def test_a_number_with_a_unit_has_the_bounds_of_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"^max_num_seqs: must be an integer <= 16384"):
        configure(max_num_seqs="1M")


def test_names_of_types_are_those_of_vllm() -> None:
    names = {"half": Dtype.FLOAT16, "float": Dtype.FLOAT32, "bfloat16": Dtype.BFLOAT16}
    assert {name: parse("--dtype", name).model.dtype for name in names} == names


def test_no_flag_that_exists_is_explained_as_missing() -> None:
    assert not {setting.flag.strip("-") for setting in all_settings()} & set(INSTEAD)


def test_explanations_name_flags_that_exist() -> None:
    known = {setting.flag for setting in all_settings()} | {"--no-api", "--model"}
    known |= {f"--no-{setting.flag[2:]}" for setting in all_settings() if setting.is_bool}
    named = {flag for text in INSTEAD.values() for flag in re.findall(r"--[a-z-]+", text)}
    assert len(named) > 20
    assert named <= known


@pytest.mark.parametrize("name", ["nnodes", "node_rank", "master-addr"])
def test_ranks_of_one_model_on_several_machines_are_refused_with_a_sentence(name: str) -> None:
    found = hint(name, [])
    assert found.startswith(": the ranks of a model share a machine; engines of other machines")


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("--no-enable-log-requests", "enable-log-requests"),
        ("--speculative-config.method", "speculative-config"),
        ("-cc.mode", "compilation-config"),
        ("--no-mmap", "mmap"),
    ],
)
def test_a_negated_flag_and_a_part_of_a_value_have_the_explanation_of_the_flag(
    name: str, flag: str
) -> None:
    assert hint(name, []) == f": {INSTEAD[flag]}"


def test_switches_enumerations_and_none_are_read() -> None:
    config = parse("--no-enable-prefix-caching", "--dtype", "float16", "--max-model-len", "none")
    assert not config.cache.enable_prefix_caching
    assert config.model.dtype is Dtype.FLOAT16
    assert config.model.max_model_len is None


def test_settings_of_chats_and_sampling_are_json_or_a_mapping(tmp_path: Path) -> None:
    """A value has the same type from every source: a template would take "false" for true."""
    variables, overrides = {"enable_thinking": False}, {"temperature": 0.5, "top_k": 20}
    names = {
        "default_chat_template_kwargs": '{"enable_thinking": false}',
        "override_generation_config": '{"temperature": 0.5, "top_k": 20}',
    }
    file = tmp_path / "engine.yaml"
    file.write_text(
        "default-chat-template-kwargs: {enable_thinking: false}\n"
        "override-generation-config: {temperature: 0.5, top_k: 20}\n"
    )
    flags = [word for name, text in names.items() for word in (flag_of(name), text)]
    for config in (
        resolve({}, {}, str(file)),
        resolve({}, {f"TROIKA_{name.upper()}": text for name, text in names.items()}),
        parse(*flags),
        configure(default_chat_template_kwargs=variables, override_generation_config=overrides),
    ):
        model = config.model
        assert model.default_chat_template_kwargs == variables
        assert model.override_generation_config == GenerationOverrides(temperature=0.5, top_k=20)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("{since: 2026-01-02}", "since is a date, which JSON lacks; write it as text, in quotes"),
        ("{a: [.inf]}", r"a\[0\] is inf, which JSON lacks"),
        ("{1: a}", "has the name 1, which is not a text; write it in quotes"),
        ("&a {b: *a}", "contains itself, or has too many levels"),
    ],
)
def test_a_value_of_yaml_that_json_lacks_is_named(tmp_path: Path, value: str, error: str) -> None:
    """A template in another process would get another value."""
    file = tmp_path / "engine.yaml"
    file.write_text(f"default-chat-template-kwargs: {value}\n")
    where = f"^default-chat-template-kwargs in {re.escape(str(file))}:? {error}"
    with pytest.raises(ConfigError, match=where):
        resolve({}, {}, str(file))


def test_tenant_weights_are_one_text_or_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("scheduling_policy: fair\ntenant_weights: {gold: 4, free: 0.5}\n")
    weights = {"gold": 4.0, "free": 0.5}
    assert resolve({}, {}, str(file)).scheduler.tenant_weights == weights
    text = "gold=4, free=0.5"
    fair = {"TROIKA_SCHEDULING_POLICY": "fair", "TROIKA_TENANT_WEIGHTS": text}
    assert resolve({}, fair).scheduler.tenant_weights == weights
    flags = parse("--scheduling-policy", "fair", "--tenant-weights", text)
    assert flags.scheduler.tenant_weights == weights
    given = configure(scheduling_policy="fair", tenant_weights=weights)
    assert given.scheduler.tenant_weights == weights
