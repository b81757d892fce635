"""A change of the messages' fields raises the protocol's version, and the page has all fields.

A decoder refuses a message that has more fields than it knows, so an appended field separates an
older peer as much as a new meaning does. The header's version reports this as what it is.
"""

import hashlib
import importlib
import re
from collections.abc import Iterator

from protocol.message import PROTOCOL_VERSION, Message, Record
from tests.paths import DOCS

PAGE = DOCS / "protocol.md"
MODULES = [
    *("adapters", "api_core", "core_worker", "kv_events", "lifecycle", "model_facts", "sampling"),
    *("process.host_agents", "process.zygote_link", "stores.block_link"),
]
LAYOUT = (16, "410ddefb8f192c6d")
"""The version, and the digest of all fields that messages of this version have."""


def structs(base: type) -> Iterator[type]:
    for struct in base.__subclasses__():
        if struct.__module__.startswith("protocol."):
            yield struct
        yield from structs(struct)


def all_fields() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the names of all messages and rows with those of their fields."""
    for name in MODULES:
        importlib.import_module(f"protocol.{name}")
    for base in (Message, Record):
        for struct in structs(base):
            yield struct.__name__, struct.__struct_fields__  # type: ignore[attr-defined]


def digest() -> str:
    """Return a digest of the names of all messages and rows, with their fields in order."""
    lines = {f"{name}: {', '.join(fields)}" for name, fields in all_fields()}
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def test_messages_with_other_fields_have_another_version() -> None:
    advice = "fields of messages have changed: raise PROTOCOL_VERSION, and set LAYOUT here"
    assert (PROTOCOL_VERSION, digest()) == LAYOUT, advice


def test_the_page_of_the_protocol_states_its_version() -> None:
    assert f"version `{PROTOCOL_VERSION}`" in PAGE.read_text()


def section(page: str, begin: str, end: str) -> str:
    """Return the part of the page that begins and ends with these texts."""
    return page[page.index(begin) : page.index(end, page.index(begin))]


def described_by(page: str, name: str) -> str:
    """Return the part of the page that has the fields of a message."""
    if name == "AddRequest":
        return section(page, "#### AddRequest", "#### EngineStats")
    if name == "EngineStats":
        return section(page, "#### EngineStats", "#### Rows")
    if name == "ModelFacts":
        return section(page, "`ModelFacts`, the facts", "A request has one")
    rows: list[str] = re.findall(rf"^\|(?:[^|`]*\|)? `{name}`.*$", page, re.MULTILINE)
    return rows[0]


def test_the_page_of_the_protocol_names_each_message() -> None:
    page, known = PAGE.read_text(), dict(all_fields())
    messages = {struct.__name__ for struct in structs(Message)} & set(known)
    assert not {name for name in messages if f"`{name}`" not in page}


def test_the_page_of_the_protocol_has_the_fields_of_each_message_in_their_order() -> None:
    page = PAGE.read_text()
    known = dict(all_fields())
    names = set(re.findall(r"^\|(?:[^|`]*\|)? `(\w+)`", page, re.MULTILINE)) & set(known)
    assert {"AddRequest", "SchedulerOutput", "Ready", "WorkerDied", "Join"} <= names
    assert {"HaveBlocks", "ReadBlock", "BlocksHad", "BlockContent"} <= names
    for name in sorted(names | {"ModelFacts", "EngineStats"}):
        text, place = described_by(page, name), 0
        for field in known[name]:
            found = re.compile(rf"\b{field}\b").search(text, place)
            assert found, f"{name}: {field} is missing, or not in its place"
            place = found.end()
