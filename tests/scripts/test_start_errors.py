"""What prevents a start: one sentence that states what to do, before any process is started."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.config import ConfigError
from protocol.config.settings import configure
from scripts.hub.messages import gguf_files, hub_names
from scripts.supervisor import checks, serving, startup
from scripts.supervisor.model_names import with_directories
from tests.certificates import make_certificate
from tests.paths import ROOT
from worker_proc.errors import UnsupportedModel
from worker_proc.startup import early_refusals

SUPERVISOR = [sys.executable, "-P", "-m", "scripts.supervisor"]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one complete checkpoint, an empty one and a file."""
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "Qwen3-0.6B" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for file in ("weights.bin", "x.gguf"):
        (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("nothing", "model {}/nothing does not exist; give a checkpoint directory, a model "),
        ("Qwen3-0.6b", "model {0}/Qwen3-0.6b does not exist; did you mean {0}/Qwen3-0.6B?"),
        ("demo_chat", "model {}/demo_chat does not exist; did you mean demo-chat?"),
        ("nul", "model {}/nul does not exist; did you mean null?"),
        ("empty", "model {}/empty has no config.json; give a directory in Hugging Face format"),
        ("weights.bin", "model {}/weights.bin is a file; give a directory that holds config.json"),
    ],
)
def test_a_wrong_model_is_refused_in_a_sentence(models: Path, model: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checks.complete_config(configure(model=model))
    assert str(caught.value).startswith(sentence.format(models))


def test_a_start_without_any_process_is_refused() -> None:
    flags = ["--no-api", "--data-parallel-size", "0", "--curve-keys", "keys"]
    flags += ["--replica-addresses", "tcp://10.0.0.2:7000"]
    command = [*SUPERVISOR, "null", *flags]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 1
    assert "troika: --data-parallel-size 0 with --no-api starts nothing" in done.stderr


def test_a_model_that_its_files_exclude_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "orion"}')
    command = [*SUPERVISOR, str(tmp_path), "--no-api", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"troika: {config}: model_type is 'orion', for which")
    assert done.stderr.count("\n") == 1


def test_errors_of_the_check_of_a_model_are_left_to_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(config: object) -> None:
        raise AttributeError

    monkeypatch.setattr(early_refusals, "refuse_early", fail)
    serving._refuse_model(configure(model="demo"))


def test_models_of_other_machines_are_not_checked_here(tmp_path: Path) -> None:
    """A command without an engine of its own machine reads no files of the model."""
    (tmp_path / "config.json").write_text('{"model_type": "orion"}')
    elsewhere: dict[str, object] = {"data_parallel_size": 0, "curve_keys": "keys"}
    elsewhere["replica_file"] = str(tmp_path / "replicas")
    serving._refuse_model(configure(model=str(tmp_path), **elsewhere))
    with pytest.raises(UnsupportedModel, match="orion"):
        serving._refuse_model(configure(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("tokenizer", "tokenizer empty is not a directory with a tokenizer.json"),
        ("chat_template", "chat_template empty is not a file"),
    ],
)
def test_wrong_paths_in_settings_other_than_the_model(
    models: Path, setting: str, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        checks.complete_config(configure(model="Qwen3-0.6B", **{setting: "empty"}))
    assert str(caught.value) == sentence


def test_parsers_and_templates_are_refused_before_a_process_starts(models: Path) -> None:
    for setting in ("tool_call_parser", "reasoning_parser"):
        checks.check_chats(configure(model="null", **{setting: "off"}).model)
        with pytest.raises(ConfigError, match=f"^{setting} 'nope' must be auto, off or one of"):
            checks.check_chats(configure(model="null", **{setting: "nope"}).model)
    template = Path("template.jinja")
    template.write_text("{{ messages }}")
    model = configure(model="null", chat_template=str(template)).model
    checks.check_chats(model)
    template.write_text("{% if x %}")
    with pytest.raises(ConfigError, match=r"^chat template, line 1: "):
        checks.check_chats(model)


def test_adapters_are_refused_before_a_process_starts(models: Path) -> None:
    adapter = models / "adapter"
    config = configure(model="null", enable_lora=True, lora_modules=f"a={adapter}")
    for name, complaint in (
        ("", f"lora_modules: a: {adapter} does not exist"),
        ("other", f"lora_modules: a: {adapter} has no adapter_config.json, which"),
        ("adapter_config.json", f"lora_modules: a: {adapter} has no adapter_model.safetensors"),
    ):
        if name:
            adapter.mkdir(exist_ok=True)
            (adapter / name).write_text("{}")
        with pytest.raises(ConfigError) as caught:
            checks.check_adapters(config)
        assert str(caught.value).startswith(complaint)
    (adapter / "adapter_model.safetensors").write_text("x")
    checks.check_adapters(config)


def test_a_checkpoint_without_a_tokenizer(models: Path) -> None:
    named = str(models / "Qwen3-0.6B")
    with pytest.raises(ConfigError, match=r"has no tokenizer.json; name a directory that has one"):
        checks.check_tokenizer(configure(model=named).model)
    checks.check_tokenizer(configure(model=named, tokenizer="other").model)
    checks.check_tokenizer(configure(model="x.gguf").model)
    checks.check_tokenizer(configure(model="organization/name").model)
    (models / "Qwen3-0.6B" / "tokenizer.json").write_text("{}")
    checks.check_tokenizer(configure(model=named).model)


def test_settings_that_need_a_gpu(models: Path) -> None:
    node = models / "nvidiactl"
    for name, value, shown in (
        ("device", "cuda", "device cuda"),
        ("batch_invariant", True, "batch_invariant"),
        ("attention_backend", "triton", "attention_backend triton"),
    ):
        config = configure(model="Qwen3-0.6B", **{name: value})
        node.unlink(missing_ok=True)
        with pytest.raises(ConfigError, match=f"^{shown} needs a GPU, and this machine has none"):
            checks.check_device(config, [str(node)])
        node.touch()
        checks.check_device(config, [str(node)])
    checks.check_device(configure(model="Qwen3-0.6B"), ["/nothing"])


@pytest.mark.parametrize("setting", ["kv_offload_dir", "journal_dir"])
def test_directories_that_cannot_be_written(models: Path, setting: str) -> None:
    """They are made if they are missing; those of a role that is not here are not looked at."""
    made = models / "new" / "directory"
    checks.check_directories(configure(**{setting: str(made)}), has_api=True)
    assert made.stat().st_mode & 0o777 == 0o700
    assert list(made.iterdir()) == []
    within = models / "weights.bin" / "directory"
    config = configure(**{setting: str(within)})
    with pytest.raises(ConfigError, match=f"^{setting} {within}: Not a directory$"):
        checks.check_directories(config, has_api=True)
    if setting == "journal_dir":
        checks.check_directories(config, has_api=False)
    config = configure(**{setting: str(within.parent)})
    with pytest.raises(ConfigError, match=f"^{setting} {within.parent} is a file, not a directory"):
        checks.check_directories(config, has_api=True)


def test_names_of_the_hub_are_those_that_no_path_has(models: Path) -> None:
    """They keep their names until their snapshots are there."""
    draft = {"speculative_model": "Qwen/Qwen3-0.6B-draft"}
    model = checks.complete_config(
        configure(model="Qwen/Qwen3-8B", revision="v1", num_speculative_tokens=2, **draft)
    ).model
    assert hub_names(model) == {"model": "Qwen/Qwen3-8B", **draft}
    assert model.served_model_name == ("Qwen/Qwen3-8B",)
    local = with_directories(model, {"model": "/snapshot", "speculative_model": "/draft"})
    assert (local.model, local.speculative_model, hub_names(local)) == ("/snapshot", "/draft", {})
    assert local.shown_model == "Qwen/Qwen3-8B"
    (models / "Qwen").mkdir()
    (models / "Qwen3-0.6B").rename(models / "Qwen" / "Qwen3-8B")
    model = checks.complete_config(configure(model="Qwen/Qwen3-8B")).model
    assert (model.model, hub_names(model)) == (str(models / "Qwen" / "Qwen3-8B"), {})
    assert not hub_names(checks.complete_config(configure(model="null")).model)
    one = checks.complete_config(configure(model="Qwen/Qwen3-8B-GGUF:Q4_K_M")).model
    assert hub_names(one) == {"model": "Qwen/Qwen3-8B-GGUF:Q4_K_M"}
    file = checks.complete_config(configure(model="x.gguf")).model
    assert (hub_names(file), gguf_files(file)) == ({}, {"model": str(models / "x.gguf")})
    assert (file.served_model_name, file.shown_model) == (("x",), "x.gguf")
    with pytest.raises(ConfigError) as caught:
        checks.complete_config(configure(model="Qwen/Qwen3-8B", revision="v1"))
    assert str(caught.value).startswith("revision v1 belongs to a model of the hub")


def test_addresses_keys_and_certificates_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """Addresses that cannot be used, keys and certificates that cannot be read."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expect(
            f"cannot listen on host 127.0.0.1, port {port}: Address already in use; choose others "
            "with --host and --port (port 0: any free one)",
            port=port,
        )
    expect("cannot listen on host no.invalid, port 8000: ", host="no.invalid")
    file = tmp_path / "file"
    file.write_text("# a comment\n\n")
    expect(f"cannot listen on uds {file}: there is a file that is not a socket", uds=str(file))
    expect(f"api_key_file {file} holds no key; it needs one per line", api_key_file=str(file))
    gone = str(tmp_path / "gone")
    expect(f"api_key_file {gone} cannot be read: No such file", api_key_file=gone)
    expect(f"ssl_certfile {gone} cannot be read: No such file", ssl_certfile=gone)
    expect(f"ssl_certfile {file} cannot be used: it is not PEM", ssl_certfile=str(file))
    certificate, key = make_certificate(tmp_path, "one")
    _, other_key = make_certificate(tmp_path, "two")
    expect(
        f"ssl_certfile {certificate} and ssl_keyfile {other_key} cannot be used: key values "
        "mismatch",
        ssl_certfile=str(certificate),
        ssl_keyfile=str(other_key),
    )
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", str(key), "-aes256", "-passout", "pass:x", "-out"]
    subprocess.run([*command, str(locked)], check=True, timeout=20)
    expect(
        f"the private key in {locked} has a passphrase; remove it",
        ssl_certfile=str(certificate),
        ssl_keyfile=str(locked),
    )


def expect(sentence: str, **values: object) -> None:
    config = configure(model="null", **({"port": 0} if "host" not in values else {}) | values)
    with pytest.raises(ConfigError) as caught:
        startup.open_listener(config.api)
    assert str(caught.value).startswith(sentence)


def test_program_ends_with_the_sentence_and_no_traceback() -> None:
    done = subprocess.run(
        [*SUPERVISOR, "/nothing/here"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "troika: model /nothing/here does not exist; give a checkpoint directory, a model of the "
        "Hugging Face hub as ORGANIZATION/NAME, a GGUF file, 'demo', 'demo-chat' or 'null'\n"
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--api-key", "k"], "pass it with --api-key-file or the variable TROIKA_API_KEY"),
        (["--api-key=k"], "pass it with --api-key-file or the variable TROIKA_API_KEY"),
        (["--host", "0.0.0.0"], "every client that can reach 0.0.0.0 may use this server"),
    ],
)
def test_choices_that_may_harm_are_named_once(argv: list[str], sentence: str) -> None:
    _, config = startup.parse("troika", ["null", *argv])
    (warning,) = startup.warnings(argv, config)
    assert sentence in warning
    assert not list(startup.warnings([], configure(model="null", uds="/x", host="0.0.0.0")))


def test_a_file_of_keys_that_others_can_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("k\n")
    config = configure(model="null", api_key_file=str(file))
    file.chmod(0o600)
    assert not list(startup.warnings([], config))
    file.chmod(0o644)
    assert list(startup.warnings([], config)) == [
        f"every user of this machine can read {file}: chmod 600"
    ]


def test_journals_that_no_process_reads_are_named(tmp_path: Path) -> None:
    """There are some after a start with fewer API processes."""
    for name in ("api-1", "api-2", "api-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0000000000000001.journal").touch()
    settings = {"model": "null", "journal_dir": str(tmp_path)}
    assert not list(startup.warnings([], configure(**settings, api_server_count=3)))
    assert list(startup.warnings([], configure(**settings, api_server_count=2))) == [
        f"requests in api-2 of {tmp_path} are not resumed: api_server_count is only 2"
    ]


def test_setup_names_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """Root may write everywhere, so a file stands where the directory should be."""
    for name in ("scripts/setup", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    (tmp_path / "scripts/setup").chmod(0o755)
    (tmp_path / ".venv").write_text("")
    done = subprocess.run(
        [tmp_path / "scripts/setup"], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"troika: cannot write to {tmp_path}/.venv; make the checkout writable, or copy it to a "
        "directory of yours\n"
    )


def test_a_key_in_a_variable_of_another_server_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert list(startup.warnings([], configure(model="null"))) == [
        "VLLM_API_KEY has no effect: clients need no key; set TROIKA_API_KEY"
    ]
    assert not list(startup.warnings([], configure(model="null", api_key=("secret",))))
