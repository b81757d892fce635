"""A change of the messages' fields raises the protocol's version.

A decoder refuses a message that has more fields than it knows, so an appended field separates an
older peer as much as a new meaning does. The header's version reports this as what it is.
"""

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path

from protocol.message import PROTOCOL_VERSION, Message, Record

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
MODULES = [
    *("adapters", "api_core", "core_worker", "kv_events", "lifecycle", "sampling", "zygote_link"),
    *("process.host_agents", "stores.block_link"),
]
LAYOUT = (14, "05906ed16c508915")
"""The version, and the digest of all fields that messages of this version have."""


def structs(base: type) -> Iterator[type]:
    for struct in base.__subclasses__():
        if struct.__module__.startswith("protocol."):
            yield struct
        yield from structs(struct)


def digest() -> str:
    """Return a digest of the names of all messages and rows, with their fields in order."""
    for name in MODULES:
        importlib.import_module(f"protocol.{name}")
    lines = {
        f"{struct.__name__}: {', '.join(struct.__struct_fields__)}"  # type: ignore[attr-defined]
        for base in (Message, Record)
        for struct in structs(base)
    }
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def test_messages_with_other_fields_have_another_version() -> None:
    advice = "fields of messages have changed: raise PROTOCOL_VERSION, and set LAYOUT here"
    assert (PROTOCOL_VERSION, digest()) == LAYOUT, advice


def test_the_page_of_the_protocol_states_its_version() -> None:
    assert f"version `{PROTOCOL_VERSION}`" in PAGE.read_text()
