"""Layers whose settings differ from those of most, found by the rules that a checkpoint states.

Rules for layers that are not quantized are left out: the tensors of a layer show whether it is
quantized, and their shapes show whether its settings are those of its rule.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from worker_proc.quantization.scheme import Scheme, Settings

_PLAIN, _CODED = "-:", "+:"
"""Prefixes of the rules of `dynamic`: for plain layers, and for quantized ones."""


class LayerRule(NamedTuple):
    """The scheme of the layers that a test on their names finds."""

    finds: Callable[[str], object]
    scheme: Scheme


def scheme_by_rules(rules: Sequence[LayerRule], common: Scheme) -> Callable[[str], Scheme]:
    """Return a function from a layer's name to the scheme of its first rule, or the common one."""
    return partial(_first_scheme, rules, common)


def _first_scheme(rules: Sequence[LayerRule], common: Scheme, layer: str) -> Scheme:
    return next((rule.scheme for rule in rules if rule.finds(layer)), common)


def read_dynamic(settings: Settings, read: Callable[[Settings], Scheme]) -> list[LayerRule]:
    """Return the rules of the key `dynamic` of GPTQModel.

    A key is a prefix or none, and a regular expression that matches the beginning of a name.
    """
    if not settings.get("dynamic"):
        return []
    section = settings.section("dynamic")
    common = {key: value for key, value in settings.items() if key != "dynamic"}
    return [
        LayerRule(
            compiled(section, key, key.removeprefix(_CODED)).match,
            read(section.section(key).with_defaults(common)),
        )
        for key, _ in section.items()
        if not key.startswith(_PLAIN)
    ]


def compiled(settings: Settings, key: str, text: str) -> re.Pattern[str]:
    """Return the regular expression of a rule; raises UnsupportedModel, which names the key."""
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError):
        raise settings.unsupported(key, "keys that are regular expressions") from None
