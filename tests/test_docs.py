"""Every reference in the documentation leads somewhere."""

import ast
import builtins
import re
import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT

REFERENCE = re.compile(r"`([\w/]+\.py):([\w.]+?)(?:\(\))?`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BARE_PYTHON = re.compile(r"^python3? .*$", re.MULTILINE)
COMMAND = re.compile(r"\.venv/bin/python -m ((?:scripts|tests|worker_proc)[\w.]*)")


def pages() -> list[Path]:
    """Return all tracked Markdown files."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.splitlines()]


def defined(tree: ast.AST, prefix: str = "") -> set[str]:
    """Return the dotted names of a module's or class's functions, classes and constants."""
    names = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                names |= defined(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
    return names


def problem_of(file: str, name: str) -> str | None:
    """Return why a reference `file.py:name` does not resolve; a method may lack its class."""
    path = ROOT / file
    if not path.is_file():
        return f"{file} does not exist"
    names = defined(ast.parse(path.read_text()))
    if name in names or any(known.endswith(f".{name}") for known in names):
        return None
    return f"{file} does not define {name}"


def anchors(text: str) -> set[str]:
    """The fragments that GitHub gives to the headings of a page."""
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in HEADING.findall(plain)
    }


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page whose file or heading does not exist."""
    broken = []
    for link in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if re.match(r"\w+:", link):
            continue
        file, _, fragment = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        headings = anchors(target.read_text()) if target.suffix == ".md" and target.exists() else ()
        if not target.exists() or (headings and fragment and fragment not in headings):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page: Path) -> None:
    assert broken_links(page) == []


def runs_something(module: str) -> bool:
    """Whether `python -m MODULE` calls a function, and does not only define some."""
    path = ROOT / module.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    return file.is_file() and (path.is_dir() or 'if __name__ == "__main__":' in file.read_text())


def test_every_command_of_the_documentation_runs_something() -> None:
    commands = {name for page in pages() for name in COMMAND.findall(page.read_text())}
    assert "scripts.batch.command" in commands
    assert {name for name in commands if not runs_something(name)} == set()


def test_every_command_names_the_interpreter_of_a_checkout() -> None:
    """Another one has none of the packages."""
    bare = [line for page in pages() for line in BARE_PYTHON.findall(page.read_text())]
    assert bare == []


def test_every_url_of_a_curl_command_has_a_host() -> None:
    """curl takes `:8000/livez` for a URL without a host, and refuses it."""
    texts = {page.name: page.read_text() for page in pages()}
    found = {name: re.findall(r"curl [^\n`|]*['\" ]:\d.*", text) for name, text in texts.items()}
    assert {name: commands for name, commands in found.items() if commands} == {}


def unknown_classes(page: str) -> set[str]:
    """Return names in capitals that Python blocks use, and no block so far imports or defines."""
    known, unknown = set(dir(builtins)), set()
    for block in PYTHON.findall(page):
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        nodes = list(ast.walk(compile(block, "block", "exec", flags)))
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                known |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                known.add(node.name)
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        unknown |= {name for name in names - known if name[0].isupper()}
    return unknown


EXAMPLES = [page for page in pages() if page.parent.name == "docs" or page.parent == ROOT]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_class_of_an_example_is_imported_on_its_page(page: Path) -> None:
    assert unknown_classes(page.read_text()) == set()


def test_classes_that_are_not_imported_are_found() -> None:
    page = "```python\nfrom a import B\nawait B(C)\n```\nD\n```python\nB() or Other('E')\n```"
    assert unknown_classes(page) == {"C", "Other"}


PATTERN = ("file.py", "function")
"""The reference that CONTRIBUTING.md shows as an example."""
ARCHITECTURE = REFERENCE.findall((ROOT / "docs" / "architecture.md").read_text())


def test_every_reference_to_code_resolves() -> None:
    found = {reference for page in pages() for reference in REFERENCE.findall(page.read_text())}
    problems = {problem_of(file, name) for file, name in found - {PATTERN}}
    assert problems - {None} == set()


def test_the_text_of_a_link_to_a_page_is_its_name() -> None:
    named = re.compile(r"\[([\w/.]+\.md)\]\(([\w/.]+\.md)")
    links = [link for page in pages() for link in named.findall(page.read_text())]
    assert [link for link in links if Path(link[0]).name != Path(link[1]).name] == []


def test_the_life_of_a_request_has_references() -> None:
    assert len(ARCHITECTURE) >= 10


@pytest.mark.parametrize(
    ("text", "resolves"),
    [
        ("`tests/test_docs.py:defined`", True),
        ("`tests/test_docs.py:defined()`", True),
        ("`core_proc/engine.py:EngineCore.schedule`", True),
        ("`core_proc/engine.py:schedule`", True),
        ("`core_proc/engine.py:EngineCore.nothing`", False),
        ("`core_proc/nothing.py:EngineCore`", False),
    ],
)
def test_references_are_found_and_resolved(text: str, resolves: bool) -> None:
    [(file, name)] = REFERENCE.findall(text)
    assert (problem_of(file, name) is None) == resolves


def test_links_are_found_and_resolved(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Other page: one `name`\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#other-page-one-name) [c](#here) [d](https://x.org/y)\n"
        "[e](missing.md) [f](other.md#no-heading) [g](#there)"
    )
    assert broken_links(page) == ["missing.md", "other.md#no-heading", "#there"]
