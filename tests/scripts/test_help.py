"""The help of `troika serve`, and errors in its arguments: one line that states what to do."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.config import EngineConfig
from protocol.config.setting_fields import all_settings
from protocol.process.status import StatusLink
from protocol.process.version import version
from scripts import cli, keys, restart, status
from scripts.supervisor import startup
from tests.paths import ROOT

GROUPS = sorted(EngineConfig.__struct_fields__)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def output(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    """Parse arguments that end the program; return what it prints."""
    with pytest.raises(SystemExit) as caught:
        startup.parse("troika serve", argv)
    assert caught.value.code == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


@pytest.mark.parametrize("topic", ["", "=all", *(f"={group}" for group in GROUPS)])
def test_every_page_fits_into_80_columns(capsys: pytest.CaptureFixture[str], topic: str) -> None:
    lines = output(capsys, f"--help{topic}").splitlines()
    assert max(map(len, lines)) <= 80
    assert topic or len(lines) <= 45, "the overview fits on a screen"


def test_groups_together_show_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    shown = [output(capsys, f"--help={group}") for group in GROUPS]
    flags = {word for page in shown for word in page.replace("--[no-]", "--").split()}
    assert {setting.flag for setting in all_settings()} <= flags
    overview = output(capsys, "--help")
    assert all(f"\n  {group} " in overview for group in GROUPS)


@pytest.mark.parametrize("topic", ["max-num-seqs", "--max-num-seqs", "max_num_seqs"])
def test_help_about_a_flag_has_its_bounds_and_sources(
    capsys: pytest.CaptureFixture[str], topic: str
) -> None:
    page = output(capsys, f"--help={topic}")
    for text in ("Maximum number", "TROIKA_MAX_NUM_SEQS", ">= 1 and <= 16384", "64", "scheduler"):
        assert text in page


def test_help_whose_reader_has_left_ends_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", pipe)
        with pytest.raises(SystemExit) as caught:
            startup.parse("troika serve", ["--help"])
        assert caught.value.code == 0
        pipe.write("the rest")


def test_help_shows_bytes_with_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    page = output(capsys, "--help=max-body-bytes")
    assert ">= 1 KiB and <= 1 GiB" in page
    assert page.endswith(" 4 MiB\n")
    assert output(capsys, "--help=swap-space-bytes").endswith(" 0\n")


def test_help_about_a_part_of_a_name_shows_all_flags_that_have_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = output(capsys, "--help=ssl")
    assert page.count("--ssl-") == 3


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["--max-num-sequs", "3"],
            "unknown flag --max-num-sequs; did you mean --max-num-seqs?; see --help",
        ),
        (["--max-num-sequs=3"], "unknown flag --max-num-sequs; did you mean --max-num-seqs?"),
        (["demo", "x"], "unknown argument x; see --help"),
        (["demo", "b"], "unknown argument b; see --help"),
        (["demo", "port", "8001"], "unknown argument port; did you mean --port?; see --help"),
        (["--frobnicate"], "unknown flag --frobnicate; see --help"),
        (["--prot", "8001"], "unknown flag --prot; did you mean --port?"),
        (["--max-logprobs", "5"], "unknown flag --max-logprobs: a request may ask for 20; see"),
        (
            ["--quantization", "awq"],
            "'awq' is not one of w8a16, w4a16, w8a8; the format of a quantized checkpoint needs no",
        ),
        (["--trust-remote-code"], "--trust-remote-code: code from a checkpoint is never executed"),
        (["--response-role", "x"], "--response-role: the role of an answer is assistant"),
        (["-tp", "2"], "unknown flag -tp: --tensor-parallel-size; see --help"),
        (["-c", "4096"], "unknown flag -c: --max-model-len; see --help"),
        (["-hf", "a/b"], "unknown flag --hf-repo: MODEL may be a name such as"),
        (["-O3"], "unknown flag -O3: decode steps are CUDA graphs"),
        (["demo", "-1"], "unknown argument -1; see --help"),
        (["--port"], "--port needs a value"),
        (["--enforce-eager=yes"], "--enforce-eager takes no value\n"),
        (["--port", "x"], "--port: 'x' is not a whole number"),
        (["--port", "70000"], "--port: must be an integer <= 65535, got '70000'"),
        (["--watermark", "x"], "--watermark: 'x' is not a number"),
        (["--dtype", "int3"], "--dtype: 'int3' is not one of auto, float32, bfloat16, float16"),
        (["--scheduling-policy", "lifo"], "'lifo' is not one of fcfs, priority, shortest, fair"),
        (["--allowed-origins", "a.example"], "'a.example' is not an origin such as https://app"),
        (["--core-listen", "host"], "--core-listen: 'host' is not HOST:PORT, as 10.0.0.2:7000\n"),
        (["--agents-listen", "host"], "--agents-listen: 'host' is not HOST:PORT"),
        (["--replica-addresses", "host:1"], "'host:1' is not tcp://HOST:PORT"),
        (["--kv-listen", "host:0"], "'host:0' is not HOST:PORT, as 10.0.0.2:7001, with a port"),
        (["--session-key", "a b"], "'a b' is not cache_salt or a header's name of 1 to 64"),
        (["--ssl-keyfile", "k"], "--ssl-keyfile needs --ssl-certfile"),
        (["--config", "/nothing"], "cannot read /nothing: No such file or directory"),
        (["--help=schedular"], "schedular; did you mean scheduler?; see --help"),
    ],
)
def test_wrong_arguments_are_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], line: str
) -> None:
    text = output(capsys, *argv, status=2)
    assert line in text
    assert text.startswith("troika: ")
    assert text.count("\n") == 1
    assert "usage" not in text


def test_both_commands_print_the_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = f"troika {version()}\n"
    assert output(capsys, "--version") == expected
    monkeypatch.setattr("sys.argv", ["troika", "--version"])
    assert cli.main() == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("word", ["-h", "--help", "help"])
def test_help_lists_the_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr("sys.argv", ["troika", word])
    assert cli.main() == 0
    assert "troika keys DIR NAME..." in capsys.readouterr().out


def test_errors_of_keys_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert keys.main([str(tmp_path), "api"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert keys.main([str(tmp_path), "api"]) == 0
    assert capsys.readouterr().err == f"{tmp_path} has all of these keys already\n"
    assert keys.main(["/proc/nothing", "api"]) == 1
    text = "troika: /proc/nothing cannot be used: No such file or directory\n"
    assert capsys.readouterr().err == text
    for argv in ([], [str(tmp_path)], [str(tmp_path), "a/b"]):
        with pytest.raises(SystemExit) as caught:
            keys.main(argv)
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("troika: ")
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "troika: a command is missing; there are serve, "),
        (["serv"], "troika: unknown command serv; did you mean serve?\n"),
        (["--port"], "troika: unknown command --port; there are serve, "),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    line: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["troika", *argv])
    assert cli.main() == 2
    text = capsys.readouterr().err
    assert text.startswith(line)
    assert text.count("\n") == 1


def test_the_installed_command_measures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["troika", "bench", "table", str(tmp_path / "missing.json")])
    assert cli.main() == 1
    assert capsys.readouterr().err.startswith("troika: ")
    for argv in (["--help"], ["scheduler", "--help"]):
        monkeypatch.setattr("sys.argv", ["troika", "bench", *argv])
        with pytest.raises(SystemExit):
            cli.main()
        assert capsys.readouterr().out.startswith(f"usage: troika bench {' '.join(argv[:-1])}")


def test_a_flag_that_is_on_is_shown_with_both_its_forms(capsys: pytest.CaptureFixture[str]) -> None:
    page = output(capsys, "--help=enable_pag")
    assert page.startswith("  --[no-]enable-page")


def documented_pages() -> list[tuple[str, str]]:
    """Return the pages of help that docs/first_hour.md shows, with their flags."""
    text = (ROOT / "docs" / "first_hour.md").read_text()
    return re.findall(r"```\n\$ troika serve (--help\S*)\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(("flag", "shown"), documented_pages())
def test_documented_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flag: str, shown: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert output(capsys, flag) == shown


@pytest.mark.parametrize(("main", "argv"), [(status.main, []), (restart.main, ["worker"])])
def test_a_directory_without_an_engine_is_named_at_once(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    main: Callable[[list[str]], int],
    argv: list[str],
) -> None:
    monkeypatch.setattr(StatusLink, "query", lambda *_: pytest.fail("it was asked"))
    assert main([*argv, "--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"troika: no engine runs in run dir {tmp_path}\n"


def test_all_unknown_flags_are_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["demo", "--download-dir", "/x", "--frobnicate", "-tp=2", "--bias", "-1", "-tp", "4"]
    assert output(capsys, *argv, status=2).splitlines() == [
        "troika: unknown flag --download-dir: the variable HF_HUB_CACHE names the directory of "
        "fetched models",
        "troika: unknown flag --frobnicate",
        "troika: unknown flag -tp: --tensor-parallel-size",
        "troika: unknown flag --bias; see --help",
    ]
