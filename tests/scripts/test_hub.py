"""Fetching models of a hub: what is fetched, resumed, refused, and read from the cache."""

import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from huggingface_hub import constants, snapshot_download

from protocol.config import ModelConfig
from scripts.hub import check, snapshot, transfer
from scripts.hub.check import Checker
from scripts.hub.failures import why_not_fetched
from scripts.hub.messages import (
    Fetching,
    Found,
    Line,
    Note,
    Refusal,
    Refused,
    decode,
    encode,
)
from scripts.hub.snapshot import Request, Snapshot
from tests.hub import Hub, used_hub

NAME = "tiny/model"
WEIGHTS = bytes(range(256)) * 4096
CUT_AT = 300_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A repository's files: those of a model, and others that no engine reads."""
    directory = tmp_path / "source"
    (directory / "additional_chat_templates").mkdir(parents=True)
    (directory / "onnx").mkdir()
    for file in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        (directory / file).write_text(json.dumps({"file": file}))
    for file in ("chat_template.jinja", "additional_chat_templates/rag.jinja"):
        (directory / file).write_text(f"a template in {file}")
    for file in ("README.md", "pytorch_model.bin", "onnx/model.onnx", "training_args.bin"):
        (directory / file).write_text(f"not needed: {file}")
    (directory / "model.safetensors").write_bytes(WEIGHTS)
    return directory


@pytest.fixture
def hub(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, which huggingface_hub uses in this process, with an empty cache."""
    with used_hub(tmp_path, monkeypatch) as started:
        started.add(NAME, source)
        yield started


class Fetch(NamedTuple):
    """A fetch that has ended."""

    directory: Path
    lines: list[Line]

    @property
    def files(self) -> set[str]:
        found = self.directory.rglob("*")
        return {str(path.relative_to(self.directory)) for path in found if path.is_file()}


def fetch(**options: Any) -> Fetch:
    """Fetch the model. Refusal: it cannot be fetched."""
    lines: list[Line] = []
    request = {"name": NAME, "revision": None, "needs_tokenizer": True, "check": lambda _: None}
    snapshot = Snapshot(Request(**(request | options)), lines.append)
    snapshot.prepare()
    snapshot.fetch()
    return Fetch(snapshot.directory, lines)


def refusal(**options: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        fetch(**options)
    assert str(caught.value).count("\n") == 0
    assert str(options.get("name", NAME)) in str(caught.value)
    return caught.value


def partial_files(directory: str) -> list[Path]:
    return list(Path(directory).rglob("*.incomplete"))


def test_only_the_files_that_are_needed_are_fetched_and_only_once(hub: Hub, source: Path) -> None:
    first = fetch()
    assert first.files == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("chat_template.jinja", "additional_chat_templates/rag.jinja", "model.safetensors"),
    }
    assert all((first.directory / f).read_bytes() == (source / f).read_bytes() for f in first.files)
    assert first.directory.name == hub.repositories[NAME].branches["main"]
    last = [line for line in first.lines if isinstance(line, Fetching)][-1]
    assert last.done == last.total >= len(WEIGHTS)
    assert hub.fetched("model.safetensors") == [None]
    num_requests = len(hub.requests)
    assert fetch().directory == first.directory
    again = [request.path for request in hub.requests[num_requests:]]
    assert all(path.startswith("/api/") for path in again), "a complete model needs no file"
    assert not partial_files(constants.HF_HUB_CACHE)


def test_a_file_that_another_thread_completes_meanwhile_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files with equal contents have one ETag, and so one partial file."""
    file = transfer.RemoteFile("a", "", "etag", len(WEIGHTS), tmp_path / "etag")
    file.partial.write_bytes(WEIGHTS)
    stat = Path.stat

    def complete_first(path: Path, **kwargs: Any) -> os.stat_result:
        if path == file.partial and not file.blob.exists():
            os.replace(file.partial, file.blob)
        return stat(path, **kwargs)

    monkeypatch.setattr(Path, "stat", complete_first)
    assert file.size_here == len(WEIGHTS)


def test_the_shards_of_an_index_are_fetched(
    hub: Hub, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "model.safetensors").unlink()
    shards = ("a-1.safetensors", "a-2.safetensors")
    for shard in (*shards, "consolidated.safetensors"):
        (source / shard).write_bytes(WEIGHTS)
    index = {"weight_map": {"x": shards[0], "y": shards[1], "z": shards[0]}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    fetched = fetch()
    weights = {name for name in fetched.files if "safetensors" in name}
    assert weights == {*shards, "model.safetensors.index.json"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch().directory == fetched.directory
    (fetched.directory / shards[0]).unlink()
    assert "is not complete" in str(refusal())


def test_a_connection_that_ends_early_is_resumed_where_it_ended(hub: Hub) -> None:
    hub.cuts["model.safetensors"] = [CUT_AT, 0, 2 * CUT_AT]
    assert (fetch().directory / "model.safetensors").read_bytes() == WEIGHTS
    begins = [None, f"bytes={CUT_AT}-", f"bytes={CUT_AT}-", f"bytes={2 * CUT_AT}-"]
    assert hub.fetched("model.safetensors") == begins


def test_a_connection_that_never_gets_further_is_given_up_and_the_next_start_continues(
    hub: Hub,
) -> None:
    hub.cuts["model.safetensors"] = [CUT_AT] * 10
    assert "start again to continue" in str(refusal())
    hub.cuts.clear()
    hub.requests.clear()
    assert (fetch().directory / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched("model.safetensors") == [f"bytes={CUT_AT}-"]


def test_a_part_that_is_damaged_is_fetched_again(hub: Hub) -> None:
    """After a loss of power a file may have its length, and not its content."""
    hub.cuts["model.safetensors"] = [CUT_AT] * 10
    refusal()
    hub.cuts.clear()
    [partial] = partial_files(constants.HF_HUB_CACHE)
    partial.write_bytes(bytes(partial.stat().st_size))
    fetched = fetch()
    assert (fetched.directory / "model.safetensors").read_bytes() == WEIGHTS
    bytes_here = [line for line in fetched.lines if isinstance(line, Fetching)]
    assert min(line.done for line in bytes_here) >= 0
    assert bytes_here[-1].done == bytes_here[-1].total


def test_a_file_that_another_process_fetches_is_awaited(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock is released by its death; here by this test."""
    hub.cuts["model.safetensors"] = [CUT_AT] * 10
    refusal()
    hub.cuts.clear()
    hub.requests.clear()
    # A small file that was fetched at the same time may be incomplete for a moment, too.
    partials = partial_files(constants.HF_HUB_CACHE)
    [partial] = [each for each in partials if _size(each) == CUT_AT]
    fetched: list[Fetch] = []
    with partial.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = threading.Event()
        monkeypatch.setattr(fcntl, "flock", _noting(fcntl.flock, waiting))
        thread = threading.Thread(target=lambda: fetched.append(fetch()))
        thread.start()
        assert waiting.wait(20)
        assert not hub.fetched("model.safetensors")
        fcntl.flock(other, fcntl.LOCK_UN)
    thread.join(20)
    assert (fetched[0].directory / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.fetched("model.safetensors") == [f"bytes={CUT_AT}-"]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _noting(function: Any, failed: threading.Event) -> Any:
    def call(*arguments: Any) -> None:
        try:
            function(*arguments)
        except BlockingIOError:
            failed.set()
            raise

    return call


def test_a_configuration_is_checked_before_weights_are_fetched(hub: Hub) -> None:
    checked: list[set[str]] = []

    def check(directory: Path) -> None:
        checked.append({path.name for path in directory.iterdir()})
        raise ValueError("its layers are strange")

    assert str(refusal(check=check)) == f"model {NAME} cannot run: its layers are strange"
    assert checked == [{"config.json", "generation_config.json"}]
    assert not hub.fetched("model.safetensors")


def test_what_a_hub_has_written_reaches_no_terminal_as_a_command(hub: Hub) -> None:
    def check(_: Path) -> None:
        raise ValueError("model_type is 'a\x1b[2J\udc80\nb'")

    with pytest.raises(Refusal) as caught:
        fetch(check=check)
    shown = decode(encode(caught.value.message()))
    assert isinstance(shown, Refused)
    assert shown.text == f"model {NAME} cannot run: model_type is 'a [2J b'"


def test_a_checking_process_that_dies_refuses_nothing(tmp_path: Path) -> None:
    checker = Checker(ModelConfig())
    process = checker.start()
    assert checker.start() is process
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    checker.check(tmp_path)
    checker.stop()


_LATE = """
import sys
if "slow" in next(sys.stdin):
    next(sys.stdin)
    print('"it is slow"')
print("null", flush=True)
"""
_PRINTING = """
import sys, types
device, inspection = types.ModuleType("device"), types.ModuleType("inspection")
device.resolve_device = str
inspection.inspect_config = lambda *_: print("a library prints")
sys.modules["worker_proc.cuda.device"] = device
sys.modules["worker_proc.loading.inspection"] = inspection
from scripts.hub.check import main
main()
"""


def make_checker(monkeypatch: pytest.MonkeyPatch, program: str) -> Checker:
    """Return a checker whose process is a Python program, with the arguments of the real one."""
    checker = Checker(ModelConfig())
    command = [sys.executable, "-c", program, *checker._command[-3:]]
    monkeypatch.setattr(checker, "_command", command)
    return checker


def test_a_late_answer_is_not_taken_for_that_about_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "_TIMEOUT_S", 0.5)
    checker = make_checker(monkeypatch, _LATE)
    checker.check(Path("slow"))
    monkeypatch.setattr(check, "_TIMEOUT_S", 20.0)
    checker.check(Path("fast"))
    checker.stop()


def test_what_libraries_print_is_not_taken_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = make_checker(monkeypatch, _PRINTING)
    checker.check(Path("any"))
    checker.stop()


@pytest.mark.parametrize(
    ("kept", "sentence"),
    [
        (["config.json", "x.Q4_K.gguf"], "has GGUF files; name the one to serve as tiny/"),
        (["config.json", "pytorch_model.bin"], "has only PyTorch's .bin files, and"),
        (["config.json", "adapter_model.safetensors"], "has only an adapter without its model"),
        (["config.json", "README.md"], "has no weights, and model.safetensors or"),
        (["README.md"], "has no config.json: it is not in transformers' format"),
        (["config.json", "model.safetensors"], "has no tokenizer.json; name a directory"),
    ],
)
def test_a_repository_without_what_the_engine_reads_is_refused(
    hub: Hub, tmp_path: Path, kept: list[str], sentence: str
) -> None:
    directory = tmp_path / "other"
    directory.mkdir()
    for file in kept:
        (directory / file).write_text("{}")
    hub.add(NAME, directory)
    assert sentence in str(refusal())
    assert not Path(constants.HF_HUB_CACHE).exists(), "nothing was fetched"


def test_wrong_names_and_models_without_access(hub: Hub, tmp_path: Path) -> None:
    wrong = refusal(name="tiny/wrong")
    assert str(wrong) == f"model tiny/wrong is not a local path, and does not exist at {hub.url}"
    assert wrong.is_absent
    assert "no model of a hub has such a name" in str(refusal(name="tiny/--"))
    text = f"model {NAME} has no revision nothing at {hub.url}"
    assert str(refusal(revision="nothing")) == text
    hub.repositories[NAME].is_gated = True
    text = (
        f"model {NAME} is gated: ask for access at {hub.url}/{NAME}, then run `hf auth login` or "
        "set HF_TOKEN"
    )
    assert str(refusal()) == text
    (tmp_path / "token").write_text("hf_other")
    assert "the token in use may not read it" in str(refusal())
    assert not partial_files(constants.HF_HUB_CACHE)
    (tmp_path / "token").write_text(Hub.token)
    assert "model.safetensors" in fetch().files


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (404, "does not exist at"),
        (403, "denies access: ask for access at"),
        (401, "or is private or gated: check the name, or ask for access at"),
        (500, "answers 500; start again"),
    ],
)
def test_a_hub_that_sends_only_a_status(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, status: int, sentence: str
) -> None:
    monkeypatch.setattr(Hub, "status", status)
    assert sentence in str(refusal())


def test_a_disk_without_enough_space_is_noticed_before_the_download(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")._replace(free=len(WEIGHTS) // 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "on the disk of" in str(refusal())
    assert not hub.fetched("model.safetensors")


def test_a_disk_that_becomes_full_keeps_nothing(hub: Hub) -> None:
    hub.cuts["model.safetensors"] = [CUT_AT] * 10
    refusal()
    [partial] = partial_files(constants.HF_HUB_CACHE)
    partial.unlink()
    partial.symlink_to("/dev/full")
    assert "is full; free some space" in str(refusal())
    assert not partial.is_symlink()


def test_the_cache_serves_without_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        text = str(refusal())
        assert "is not complete in the cache" in text
        assert f"HF_HUB_OFFLINE=0 hf download {NAME}" in text
    directory = fetch().directory
    hub.requests.clear()
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert fetch() == Fetch(directory, [Found(NAME, directory.name)])
        assert fetch(revision=directory.name).directory == directory
        refusal(revision="another")
        (directory / "model.safetensors").unlink()
        assert "is not complete" in str(refusal())
    assert not hub.requests


def test_a_hub_that_is_gone_is_named_unless_the_cache_has_the_model(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fetch().directory
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", gone)
    again = fetch()
    assert again.directory == directory
    [note] = [line for line in again.lines if isinstance(line, Note)]
    assert note.text.startswith(f"{gone} cannot be reached")
    assert f"{gone} cannot be reached" in str(refusal(name="tiny/other"))


def test_a_password_in_the_hubs_address_is_never_shown(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = hub.url.replace("//", "//user:s3cret@")
    monkeypatch.setattr(constants, "ENDPOINT", secret)
    monkeypatch.setattr(Hub, "status", 404)
    assert f"does not exist at {hub.url}" in str(refusal())
    for status in (401, 403, 500):
        monkeypatch.setattr(Hub, "status", status)
        assert "s3cret" not in str(refusal())
    monkeypatch.setattr(Hub, "status", 0)
    monkeypatch.setattr(Hub, "login_page", b"<html>log in</html>")
    assert "s3cret" not in str(refusal())
    error = ValueError(f"no answer of {secret}/api")
    assert "s3cret" not in str(why_not_fetched(NAME, None, error))


def test_a_hub_that_never_answers_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "cannot be reached" in str(refusal())


def test_an_answer_that_is_not_of_a_hub_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "login_page", b"<html>log in</html>")
    assert "gives no valid answer (JSONDecodeError" in str(refusal())


def test_files_that_are_too_large_for_http_are_left_to_the_library(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(WEIGHTS) - 1)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    with pytest.raises(Refusal, match="cannot be fetched"):  # it does not take them over HTTP
        fetch()
    assert not hub.fetched("model.safetensors")
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(WEIGHTS))
    assert (fetch().directory / "model.safetensors").read_bytes() == WEIGHTS


def test_what_the_library_fetches_is_reported_while_it_grows(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent ends a fetch that reports nothing for some minutes."""
    fetch()
    blobs = next(Path(constants.HF_HUB_CACHE).rglob("blobs"))
    shutil.rmtree(blobs.parent / "snapshots")
    for blob in blobs.iterdir():
        blob.unlink()
    reported = threading.Event()
    download = snapshot_download

    def download_slowly(*args: Any, allow_patterns: list[str], **options: Any) -> str:
        if "model.safetensors" in allow_patterns:
            (blobs / "large.incomplete").write_bytes(WEIGHTS[: len(WEIGHTS) // 2])
            assert reported.wait(20)
            monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(WEIGHTS))
        found: str = download(*args, allow_patterns=allow_patterns, **options)
        return found

    lines: list[Line] = []

    def report(line: Line) -> None:
        lines.append(line)
        if isinstance(line, Fetching) and line.total == len(WEIGHTS) and line.done:
            reported.set()

    monkeypatch.setattr(transfer, "_WATCH_S", 0.01)
    monkeypatch.setattr(snapshot, "snapshot_download", download_slowly)
    monkeypatch.setattr(constants, "MAX_HTTP_DOWNLOAD_SIZE", len(WEIGHTS) - 1)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    fetching = Snapshot(Request(NAME, None, True, lambda _: None), report)
    fetching.prepare()
    fetching.fetch()
    assert (fetching.directory / "model.safetensors").read_bytes() == WEIGHTS
    assert all(line.done <= line.total for line in lines if isinstance(line, Fetching))


def test_a_branch_that_moves_never_mixes_revisions(hub: Hub, source: Path, tmp_path: Path) -> None:
    """The new configuration comes while the files of the old commit are fetched."""
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    (moved / "model.safetensors").write_bytes(WEIGHTS[::-1])
    (moved / "tokenizer.json").write_text("{}")
    commits: list[str] = []

    def move(_: Path) -> None:
        commits.append(hub.repositories[NAME].push(moved))

    first = fetch(check=move)
    assert (first.directory / "model.safetensors").read_bytes() == WEIGHTS
    assert (first.directory / "tokenizer.json").read_text() != "{}"
    second = fetch()
    assert second.directory.name == commits[0] != first.directory.name
    assert (second.directory / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert fetch(revision=first.directory.name).directory == first.directory


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_file_that_is_longer_than_announced_takes_no_more_space(
    hub: Hub, is_resumed: bool
) -> None:
    if is_resumed:
        hub.cuts["model.safetensors"] = [CUT_AT] * 10
        refusal()
        hub.cuts.clear()
    hub.announced["model.safetensors"] = 2 * CUT_AT
    hub.holds["model.safetensors"] = 2 * CUT_AT + 100_000
    text = f"{hub.url} sends more of model.safetensors than the {2 * CUT_AT} bytes it states"
    assert str(refusal()) == f"model {NAME} cannot be fetched: {text}"
    sizes = [file.stat().st_size for file in partial_files(constants.HF_HUB_CACHE)]
    assert max(sizes) < CUT_AT, "nothing of it is kept"


@pytest.mark.parametrize(
    "path",
    [
        "../../../../secret.safetensors",
        "/etc/secret.safetensors",
        "./a.safetensors",
        "a//b.safetensors",
        "*.safetensors",
        "[a].safetensors",
        "a\\b.safetensors",
        "a\x1b[2J.safetensors",
    ],
)
def test_paths_that_lead_elsewhere_are_refused(hub: Hub, source: Path, path: str) -> None:
    """They would be read outside the snapshot, or stand for other files in a pattern."""
    (source / "model.safetensors").unlink()
    index = {"weight_map": {"x": path}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.listed = [path]
    text = str(refusal())
    assert text.isprintable()
    assert text.startswith(f"model {NAME}: the file name ")
    template = "additional_chat_templates/../x.jinja"
    hub.add(NAME, source).push(source)
    hub.listed = [template]
    assert template in str(refusal())
    assert not hub.fetched(template)
