"""Values of the API share no mutable default with each other."""

import importlib
import pkgutil

import api_proc
from api_proc.text.output_sequence import Delta


def test_no_named_tuple_has_a_mutable_default() -> None:
    """All instances would share it."""
    modules = [
        importlib.import_module(info.name)
        for info in pkgutil.walk_packages(api_proc.__path__, "api_proc.")
        if not info.name.endswith("__main__")
    ]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    defaults = {
        f"{kind.__name__}.{name}": value
        for kind in kinds
        for name, value in getattr(kind, "_field_defaults", {}).items()
    }
    assert "Delta.text_offsets" in defaults
    mutable = [name for name, value in defaults.items() if isinstance(value, list | dict | set)]
    assert not mutable


def test_deltas_without_offsets_share_no_list() -> None:
    offsets = Delta("a", [1]).text_offsets
    assert not isinstance(offsets, list)
    assert Delta("b", [2]).text_offsets == offsets == ()
