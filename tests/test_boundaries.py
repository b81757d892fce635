"""The walls between the packages: who imports what, read from the source and from processes."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.paths import ROOT

STDLIB = set(sys.stdlib_module_names)
ALLOWED = {
    "protocol": {"protocol", "msgspec", "zmq"},
    "api_proc": {
        *{"api_proc", "protocol", "msgspec", "starlette", "uvicorn", "uvloop", "httptools"},
        *{"tokenizers", "jinja2", "prometheus_client", "tqdm"},
    },
    "core_proc": {"core_proc", "protocol", "msgspec", "zmq"},
    "worker_proc": {
        *{"worker_proc", "protocol", "msgspec", "zmq", "torch", "transformers"},
        *{"safetensors", "numpy", "llguidance", "triton", "gguf"},
    },
}
PRODUCT = [*ALLOWED, "scripts"]
SUBPACKAGES = {
    "protocol": ["fairness", "config", "stores", "transport", "process", "client"],
    "api_proc": [
        *("chat", "fairness", "text", "resumption", "http", "peers", "metrics", "adapters"),
        *("generation", "pooling", "openai", "responses", "anthropic", "operation", "page"),
        *("openapi", "llm", "process"),
    ],
    "core_proc": ["kv", "scheduling", "recovery", "outputs", "preparation", "links"],
    "worker_proc": [
        *("native", "kv", "recurrent", "attention", "grammar", "sampling", "quantization"),
        *("gguf", "adapters", "offload", "null", "loading", "modules", "drafting"),
        *("calibration", "decoder", "parallel", "cuda", "startup"),
    ],
    "scripts": ["gguf", "hub", "block_server", "supervisor", "placement", "bench", "batch"],
}
"""Lowest first: a subpackage imports only those before it."""
MAX_ROOT_FILES = 12
STATE_MACHINES = {
    "core_proc": [
        *("engine", "invariants", "options", "pausing", "policy", "request", "scheduler"),
        *("kv/block_pool", "kv/event_recorder", "kv/kv_cache", "kv/state_blocks"),
        *("kv/load_costs", "kv/offload", "kv/prefix_lookup", "kv/remote_blocks", "kv/swap"),
        *("links/event_log", "links/workers"),
        *("outputs/check", "outputs/owners", "outputs/prompt_progress", "outputs/rows"),
        *("preparation/adapter_turns", "preparation/adapters", "preparation/grammars"),
        *("recovery/quarantine", "recovery/rejections"),
        *("scheduling/admission", "scheduling/due_index", "scheduling/partial_prefills"),
        *("scheduling/draft_limits", "scheduling/speculation", "scheduling/step_costs"),
        *("scheduling/grants", "scheduling/prompt_budget"),
        *("scheduling/request_queues", "scheduling/results", "scheduling/step"),
        *("scheduling/victims", "scheduling/waiting"),
    ],
    "worker_proc": [
        *("kv/kv_groups", "mirror", "runner", "shim"),
        *("null/blocks", "null/model", "null/runner", "null/states"),
    ],
    "protocol": [
        *("api_core", "core_worker", "kv_events", "message", "model_facts"),
        *("request_validation", "sampling"),
        *("client/controls", "client/known_engine", "client/ledger"),
        *(
            "config/engine_config",
            "config/setting_fields",
            "config/setting_values",
            "config/settings",
        ),
        "transport/frame_sequence",
    ],
    "scripts": [
        *("supervisor/policy", "supervisor/failover", "supervisor/shutdown"),
        "placement/scaling",
    ],
}
"""Modules that decide: no sockets, no threads, no sleeping."""
WITHOUT_TORCH = "worker_proc.loop, worker_proc.null.runner, worker_proc.__main__"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported_packages(path: Path) -> set[str]:
    """Return the top-level names of all imports in a file, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@cache
def import_graph() -> dict[str, set[str]]:
    """The product's modules, each with those that it imports."""
    paths = {}
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            paths[".".join(part for part in parts if part != "__init__")] = path
    graph: dict[str, set[str]] = {module: set() for module in paths}
    for module, path in paths.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names if alias.name in paths}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    target = name if name in paths else node.module
                    graph[module] |= {target} & paths.keys()
    return graph


@pytest.mark.parametrize("package", ALLOWED)
def test_package_imports_only_what_its_wall_allows(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        foreign = imported_packages(path) - STDLIB - ALLOWED[package]
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_import_graph_has_no_cycle() -> None:
    list(TopologicalSorter(import_graph()).static_order())  # raises CycleError


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_subpackage_imports_only_lower_ones(package: str) -> None:
    order = SUBPACKAGES[package]
    assert {path.parent.name for path in (ROOT / package).glob("*/__init__.py")} == set(order)
    for module, targets in import_graph().items():
        parts = module.split(".")
        if parts[0] != package or parts[1:2] == [] or parts[1] not in order:
            continue
        higher = {f"{package}.{name}" for name in order[order.index(parts[1]) + 1 :]}
        climbing = {target for target in targets if ".".join(target.split(".")[:2]) in higher}
        assert not climbing, f"{module} imports {climbing}"


def test_wire_imports_no_subpackage() -> None:
    for module, targets in import_graph().items():
        if module.startswith("protocol") and module.split(".")[1:2] not in [
            [name] for name in SUBPACKAGES["protocol"]
        ]:
            assert not {t for t in targets if t.split(".")[1] in SUBPACKAGES["protocol"]}, module


@pytest.mark.parametrize("package", PRODUCT)
def test_package_has_few_files_at_its_root(package: str) -> None:
    assert len(list((ROOT / package).glob("*.py"))) <= MAX_ROOT_FILES


@pytest.mark.parametrize(
    "path",
    [ROOT / package / f"{name}.py" for package, names in STATE_MACHINES.items() for name in names],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_state_machine_has_no_sockets_threads_or_sleeps(path: Path) -> None:
    banned = {"zmq", "threading", "socket", "asyncio", "multiprocessing"}
    assert not imported_packages(path) & banned
    assert "time.sleep(" not in path.read_text()


def modules_after(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("modules", "banned"),
    [
        ("core_proc.__main__", {"torch", "transformers", "tokenizers", "numpy", "asyncio"}),
        ("api_proc.__main__", {"torch", "transformers", "core_proc", "worker_proc", "numpy"}),
        ("api_proc.llm", {"torch", "transformers", "core_proc", "worker_proc", "numpy", "tqdm"}),
        (WITHOUT_TORCH, {"torch", "transformers", "numpy"}),
        ("protocol.client", {"torch", "transformers", "tokenizers", "numpy", "starlette"}),
    ],
)
def test_running_process_has_not_loaded_what_it_must_not(modules: str, banned: set[str]) -> None:
    assert not modules_after(f"import {modules}") & banned


def test_triton_is_loaded_on_a_gpu_only() -> None:
    for path in (ROOT / "worker_proc").rglob("*.py"):
        assert "triton" not in imported_packages(path) or path.parent.name == "cuda", path
    loaded = modules_after(
        "from worker_proc.startup.lean_import import lean_imports\n"
        "with lean_imports(): import worker_proc.startup.load_runner"
    )
    assert "triton" not in loaded
    assert {name for name in loaded if name.startswith("worker_proc.cuda.")} == {
        "worker_proc.cuda.coverage",
        "worker_proc.cuda.device",
    }


def test_ray_and_process_groups_exist_only_where_they_are_asked_for() -> None:
    """An engine of one rank on one machine neither imports Ray nor creates a process group."""
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            place = path.relative_to(ROOT)
            assert "ray" not in imported_packages(path) or place.is_relative_to("scripts/placement")
            if "init_process_group(" in path.read_text():
                assert place == Path("worker_proc/cuda/rank_group.py")
    assert not modules_after("import scripts.supervisor.command") & {"ray", "torch"}


def test_no_module_unpickles_or_evaluates() -> None:
    """Data from a wire or a file is decoded by typed decoders only."""
    banned = ("pickle", "marshal", "eval(", "recv_pyobj", "yaml.load", "torch.load", "shelve")
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text().replace(".eval()", "")
            assert not [word for word in banned if word in text], path


def test_each_logger_is_one_that_processes_show() -> None:
    """A process shows what is logged below `troika`, and no other logger's lines."""
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            assert "getLogger(__name__)" not in path.read_text(), path


def test_every_file_has_a_docstring() -> None:
    for package in [*PRODUCT, "tests"]:
        for path in (ROOT / package).rglob("*.py"):
            assert re.match(r'"""[^\s"]', path.read_text()), f"{path} has no docstring"


def test_the_wheel_has_every_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for name in PRODUCT
        for path in (ROOT / name).rglob("__init__.py")
    }
    assert set(settings["packages"]) == found


def test_type_checkers_read_the_annotations_of_an_installed_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in settings["package-data"]["*"]
    assert all((ROOT / package / "py.typed").is_file() for package in PRODUCT)
