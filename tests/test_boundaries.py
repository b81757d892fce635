"""The walls between the packages: allowed imports, in the source and in running processes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROCESSES = {"api_proc", "core_proc", "worker_proc"}
STDLIB = set(sys.stdlib_module_names)
ALLOWED = {
    "protocol": {"protocol", "msgspec", "zmq"},
    "api_proc": {
        *{"api_proc", "protocol", "msgspec", "starlette", "uvicorn", "uvloop", "httptools"},
        *{"tokenizers", "jinja2", "prometheus_client"},
    },
    "core_proc": {"core_proc", "protocol", "msgspec", "zmq"},
    "worker_proc": {
        *{"worker_proc", "protocol", "msgspec", "zmq", "torch", "transformers"},
        *{"safetensors", "numpy"},
    },
}
PURE = {
    "core_proc": [
        *(
            "admission",
            "block_pool",
            "due_index",
            "engine",
            "event_log",
            "event_recorder",
            "invariants",
            "kv_cache",
        ),
        *("options", "outputs", "partial_prefills", "pausing", "policy", "request"),
        *(
            "request_queues",
            "results",
            "scheduler",
            "step",
            "swap",
            "victims",
            "waiting",
            "workers",
        ),
    ],
    "worker_proc": ["kv_groups", "mirror", "null_runner", "runner", "shim"],
    "protocol": [
        *("api_core", "config", "controls", "core_worker", "kv_events", "ledger", "message"),
        *("sampling", "frame_sequence", "settings"),
    ],
}
"""State machines: no sockets, no threads, no sleeping."""
WITHOUT_TORCH = ["worker_proc.loop", "worker_proc.null_runner", "worker_proc.__main__"]


def imported(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_package_imports_only_what_its_wall_allows(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        foreign = imported(path) - STDLIB - ALLOWED[package]
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


@pytest.mark.parametrize(
    "path", [ROOT / package / f"{name}.py" for package, names in PURE.items() for name in names]
)
def test_state_machines_have_no_sockets_threads_or_sleeps(path: Path) -> None:
    assert not imported(path) & {"zmq", "threading", "socket", "asyncio", "multiprocessing"}
    if path.stem != "null_runner":  # it sleeps on purpose, to simulate a slow model
        assert "time.sleep(" not in path.read_text()


def modules_after(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("core_proc.__main__", {"torch", "transformers", "tokenizers", "numpy", "asyncio"}),
        ("api_proc.__main__", {"torch", "transformers", "core_proc", "worker_proc", "numpy"}),
        *((module, {"torch", "transformers", "numpy"}) for module in WITHOUT_TORCH),
        ("protocol.sync_client", {"torch", "transformers", "tokenizers", "numpy", "starlette"}),
    ],
)
def test_running_process_has_not_loaded_what_it_must_not(module: str, banned: set[str]) -> None:
    assert not modules_after(f"import {module}") & banned


def test_nothing_unpickles_or_evaluates() -> None:
    """Bytes from a wire or a file are decoded by typed decoders only."""
    banned = ("pickle", "marshal", "eval(", "recv_pyobj", "yaml.load", "torch.load", "shelve")
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text().replace(".eval()", "")
            assert not [word for word in banned if word in text], path


def test_every_file_says_what_it_is_for() -> None:
    for package in [*ALLOWED, "scripts", "tests"]:
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"


LAYERS = {
    "api_proc": (
        ("errors", "budget", "bodies", "metrics"),
        ("text",),
        ("resumption",),
        ("http",),
        ("params", "state"),
        ("openai",),
        ("app",),
        ("commands", "__main__"),
    ),
}
"""Modules and subpackages from the lowest to the highest; a layer imports itself and lower ones."""


def imported_modules(path: Path) -> set[str]:
    """Return the full names of all modules that a file imports, and of all imported names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", LAYERS)
def test_no_import_goes_from_a_lower_layer_to_a_higher_one(package: str) -> None:
    rank = {room: number for number, layer in enumerate(LAYERS[package]) for room in layer}
    root = ROOT / package
    climbing = []
    for path in root.rglob("*.py"):
        room = path.relative_to(root).with_suffix("").parts[0]
        if room == "__init__":
            continue
        for name in imported_modules(path):
            first, _, rest = name.partition(".")
            if first == package and rank[rest.split(".")[0]] > rank[room]:
                climbing.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not climbing
    assert len(list(root.glob("*.py"))) <= 12
