"""Fetches a model's snapshot into the hub's cache: first the configuration, then all other files.

A model's name is resolved to a commit once, and only the commit is used afterwards. A moving branch
therefore never mixes two revisions.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile

from protocol.config.sentence_modules import pooling_files
from protocol.process.version import version
from scripts.hub.failures import hub_address, why_not_fetched, why_unreachable
from scripts.hub.messages import Fetching, Found, Line, Note, Refusal
from scripts.hub.remote_headers import fetched_headers
from scripts.hub.transfer import Transfer
from worker_proc.gguf.parts import part_name, part_paths
from worker_proc.quantization.methods import OWN_FILE

CONFIG = ("config.json", "generation_config.json", OWN_FILE)
_TOKENIZER = "tokenizer.json"
_WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_TEXT = (
    *(_TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.json", "chat_template.jinja"),
)
_COMMIT = re.compile(r"\w{1,64}")
_PATTERN = frozenset("*?[\\")
"""Characters that make huggingface_hub treat a file name as a pattern."""
_PROJECTOR = "mmproj"
"""Prefix of the names of GGUF files that contain a vision tower."""
_TEMPLATES = "additional_chat_templates/"
_OTHER_WEIGHTS = {
    "adapter_model.safetensors": "an adapter without its model",
    ".bin": "PyTorch's .bin files",
    ".pt": "PyTorch's .pt files",
    ".safetensors": "safetensors under other names",
}
"""Descriptions of weight files that are not supported, by the suffix of their names."""

Report = Callable[[Line], None]


class Request(NamedTuple):
    """A model to fetch from the hub."""

    name: str
    revision: str | None
    needs_tokenizer: bool
    check: Callable[[Path], None]
    """Raises ValueError if the model cannot run; called before the weights are fetched.

    Its argument is the directory that contains the configuration, or a GGUF file.
    """
    quantization: str = ""
    """Suffix of the requested GGUF file, such as Q4_K_M; empty for safetensors."""


class Snapshot:
    """The files of one commit that the engine reads. Any method may raise Refusal."""

    def __init__(self, request: Request, report: Report) -> None:
        self._request = request
        self._report = report
        self._commit = ""
        self._needed: list[str] = []
        self.directory = Path()
        """Set by `prepare`."""
        self._transfer: Transfer | None = None

    def prepare(self) -> None:
        """Find the commit and check the configuration before weights are fetched."""
        with _refusals(self._request):
            self._find()
            if self._transfer is None or self._is_complete():
                return
            if self._request.quantization:
                self._check_headers(self._transfer)
            else:
                self._fetch_config()

    def fetch(self) -> None:
        """Fetch all files that are not in the cache."""
        with _refusals(self._request):
            if self._transfer is not None:
                self._take(self._needed)
                self._keep_revision()

    def gguf_file(self) -> Path:
        """Return the fetched GGUF file, or its first part."""
        paths = [str(path.relative_to(self.directory)) for path in self.directory.rglob("*.gguf")]
        return self.directory / _gguf_files(self._request, paths)[0]

    def _find(self) -> None:
        """Find the commit and its files on the hub or, if the hub does not answer, in the cache."""
        request = self._request
        api = HfApi(library_name="troika", library_version=version())
        try:
            commit = api.repo_info(request.name, revision=request.revision).sha
            tree = api.list_repo_tree(request.name, revision=commit, recursive=True)
            paths = [file.path for file in tree if isinstance(file, RepoFile)]
        except RevisionNotFoundError:
            raise
        except Exception as error:  # a network's login page may have answered
            directory = _cached(request)
            if directory is None:
                raise
            self.directory = directory
            if not isinstance(error, OfflineModeIsEnabled):
                why = why_unreachable(error)
                self._report(Note(f"{why}: {request.name} is read from the cache"))
            self._report(Found(request.name, directory.name))
            return
        if commit is None or not _COMMIT.fullmatch(commit):
            why = f"{hub_address()} names no commit"
            raise Refusal(f"model {request.name} cannot be fetched: {why}")
        self._commit = commit
        self._report(Found(request.name, commit))
        self._transfer = Transfer(request.name, commit, self._on_bytes)
        self.directory = self._transfer.directory
        self._needed = needed_files(request, paths)
        if INDEX in self._needed:
            self._take([INDEX])
            self._needed += _shards(request.name, self.directory)
            if gone := set(self._needed) - set(paths):
                raise Refusal(f"model {request.name}: {INDEX} names {min(gone)}, which is missing")

    def _is_complete(self) -> bool:
        return all((self.directory / path).is_file() for path in self._needed)

    def _fetch_config(self) -> None:
        pooling = [path for path in pooling_files(self._needed) if path.endswith(".json")]
        self._take([path for path in CONFIG if path in self._needed] + pooling)
        with self._cannot_run():
            self._request.check(self.directory)

    def _check_headers(self, transfer: Transfer) -> None:
        """Check GGUF files by their headers, in sparse files of the full length."""
        with self._cannot_run(), fetched_headers(transfer, self._needed) as first:
            self._request.check(first)

    @contextmanager
    def _cannot_run(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise Refusal(f"model {self._request.name} cannot run: {error}") from error

    def _take(self, paths: Sequence[str]) -> None:
        missing = [path for path in paths if not (self.directory / path).is_file()]
        if missing:
            assert self._transfer is not None
            self._transfer.run(missing)
            with self._transfer.watching():
                self._link(missing)

    def _link(self, paths: Sequence[str]) -> None:
        """Call huggingface_hub to link files to their blobs."""
        snapshot_download(
            self._request.name,
            revision=self._commit,
            allow_patterns=list(paths),
            etag_timeout=constants.HF_HUB_ETAG_TIMEOUT,
            library_name="troika",
            library_version=version(),
        )
        for path in paths:
            if not (self.directory / path).is_file():
                text = f"{path} is not there after its download"
                raise Refusal(f"model {self._request.name} cannot be fetched: {text}")

    def _keep_revision(self) -> None:
        """Record the commit of the revision, for later starts without the hub."""
        revision = self._request.revision or constants.DEFAULT_REVISION
        file = self.directory.parent.parent / "refs" / revision
        with contextlib.suppress(OSError):  # the cache may be read-only
            if revision == self._commit or (file.is_file() and file.read_text() == self._commit):
                return
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = file.with_name(f"{file.name}.{os.getpid()}.tmp")
            draft.write_text(self._commit)
            draft.replace(file)

    def _on_bytes(self, done: int, total: int) -> None:
        self._report(Fetching(self._request.name, done, total))


@contextmanager
def _refusals(request: Request) -> Iterator[None]:
    """Convert errors of the hub, the network and the disk to Refusal."""
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        raise why_not_fetched(request.name, request.revision, error) from error


def _cached(request: Request) -> Path | None:
    """Return the cached snapshot of a revision if it is complete, else None."""
    try:
        found = snapshot_download(
            request.name,
            revision=request.revision,
            local_files_only=True,
            allow_patterns=list(CONFIG),
        )
    except LocalEntryNotFoundError:
        return None
    directory = Path(found)
    present = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    try:
        needed = needed_files(request, present)
        if INDEX in needed:
            needed += _shards(request.name, directory)
    except Refusal:
        return None
    return directory if set(needed) <= set(present) else None


def needed_files(request: Request, paths: Sequence[str]) -> list[str]:
    """Return the repository's files that the engine reads, except the shards in the index."""
    name, there = request.name, set(paths)
    if request.quantization:
        return _gguf_files(request, paths)
    has_weights = any(path.endswith(".safetensors") for path in paths)
    if not has_weights and any(path.lower().endswith(".gguf") for path in paths):
        raise Refusal(f"model {name} has GGUF files; name the one to serve as {name}:QUANTIZATION")
    if CONFIG[0] not in there:
        raise Refusal(f"model {name} has no {CONFIG[0]}: it is not in transformers' format")
    weights = next((path for path in (_WEIGHTS, INDEX) if path in there), None)
    if weights is None:
        kinds = [
            kind
            for end, kind in _OTHER_WEIGHTS.items()
            if any(path.endswith(end) for path in paths)
        ]
        found = f"has only {kinds[0]}" if kinds else "has no weights"
        raise Refusal(f"model {name} {found}, and {_WEIGHTS} or {INDEX} is needed")
    if request.needs_tokenizer and _TOKENIZER not in there:
        hint = "name a directory that has one with --tokenizer"
        raise Refusal(f"model {name} has no {_TOKENIZER}; {hint}")
    needed = [path for path in (*CONFIG, *_TEXT, weights) if path in there]
    needed += pooling_files(sorted(there))
    return needed + _plain(name, (path for path in there if path.startswith(_TEMPLATES)))


def _gguf_files(request: Request, paths: Sequence[str]) -> list[str]:
    """Return the GGUF file whose name ends with the quantization, or all its parts in order."""
    name, wanted = request.name, re.escape(request.quantization.lower())
    files = _plain(name, (path for path in paths if path.lower().endswith(".gguf")))
    models = {str(part_paths(Path(file))[0]): part_name(Path(file).name).model for file in files}
    found = [
        first
        for first, model in models.items()
        if re.search(rf"(^|[-._]){wanted}$", model.lower()) and not model.startswith(_PROJECTOR)
    ]
    if len(found) != 1:
        stated = ", ".join(Path(first).name for first in found or models)[:500] or "none"
        which = "several GGUF files" if found else "no GGUF file"
        raise Refusal(f"model {name} has {which} of {request.quantization}; there are: {stated}")
    parts = [str(path) for path in part_paths(Path(found[0]))]
    if missing := [path for path in parts if path not in files]:
        raise Refusal(
            f"model {name} has not all of the {len(parts)} parts of {request.quantization}:"
            f" {missing[0]} is missing"
        )
    return parts


def _shards(name: str, directory: Path) -> list[str]:
    """Return the weight files listed in the index of a directory."""
    try:
        files = set(json.loads((directory / INDEX).read_bytes())["weight_map"].values())
        if not files or not all(isinstance(file, str) for file in files):
            raise ValueError("weight_map")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"model {name}: {INDEX} does not map names to files") from error
    return _plain(name, files)


def _plain(name: str, paths: Iterable[str]) -> list[str]:
    """Return paths from the hub, sorted; each must be a plain relative path in the snapshot."""
    found = sorted(paths)
    for path in found:
        is_relative = not {"", ".", ".."}.intersection(path.split("/"))
        if not is_relative or not path.isprintable() or _PATTERN.intersection(path):
            raise Refusal(f"model {name}: the file name {path!a} is not a plain relative path")
    return found
