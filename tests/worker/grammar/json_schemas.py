"""Schemas for the tests of structured output, and a validator for what they use.

The validator is written from the JSON Schema specification, apart from the library under test.
"""

import json
import math
import re
from typing import Any

Schema = dict[str, Any]


class Invalid(Exception):
    """A value does not follow its schema; the text names the place."""


def validate(  # noqa: PLR0912
    value: Any, schema: Any, root: Any = None, where: str = "$"
) -> None:
    """Raise Invalid unless a value follows a schema."""
    root = schema if root is None else root

    def check(holds: bool, what: str) -> None:
        if not holds:
            raise Invalid(f"{where}: {value!r} violates {what}")

    if isinstance(schema, bool):
        check(schema, "false")
        return
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].removeprefix("#").strip("/").split("/"):
            target = target[part] if part else target
        validate(value, target, root, where)
    if "type" in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        check(any(_is_a(value, kind) for kind in kinds), f"type {kinds}")
    if "const" in schema:
        check(_equal(value, schema["const"]), "const")
    if "enum" in schema:
        check(any(_equal(value, item) for item in schema["enum"]), "enum")
    for part in schema.get("allOf", []):
        validate(value, part, root, where)
    for name in ("anyOf", "oneOf"):
        if name in schema:
            fits = [_fits(value, part, root, where) for part in schema[name]]
            check(any(fits) if name == "anyOf" else sum(fits) == 1, name)
    if isinstance(value, str):
        _check_text(value, schema, check)
    elif _is_a(value, "number"):
        _check_number(value, schema, check)
    elif isinstance(value, list):
        check(schema.get("minItems", 0) <= len(value), "minItems")
        check(len(value) <= schema.get("maxItems", math.inf), "maxItems")
        first = schema.get("prefixItems", [])
        for i, item in enumerate(value):
            part = first[i] if i < len(first) else schema.get("items", True)
            validate(item, part, root, f"{where}[{i}]")
    elif isinstance(value, dict):
        for name in schema.get("required", []):
            check(name in value, f"required {name}")
        properties = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        for name, item in value.items():
            matching = [part for pattern, part in patterns.items() if re.search(pattern, name)]
            if name in properties:
                matching.append(properties[name])
            for part in matching or [schema.get("additionalProperties", True)]:
                validate(item, part, root, f"{where}.{name}")


def _fits(value: Any, schema: Any, root: Any, where: str) -> bool:
    try:
        validate(value, schema, root, where)
    except Invalid:
        return False
    return True


def _is_a(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or float(value).is_integer())
    types = {"string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
    return isinstance(value, types[kind])


def _equal(one: Any, other: Any) -> bool:
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _check_text(value: str, schema: Schema, check: Any) -> None:
    check(schema.get("minLength", 0) <= len(value), "minLength")
    check(len(value) <= schema.get("maxLength", math.inf), "maxLength")
    if "pattern" in schema:
        check(re.search(schema["pattern"], value) is not None, "pattern")
    if schema.get("format") == "date":
        check(re.fullmatch(r"\d{4}-(0\d|1[0-2])-([0-2]\d|3[01])", value) is not None, "date")


def _check_number(value: float, schema: Schema, check: Any) -> None:
    check(value >= schema.get("minimum", -math.inf), "minimum")
    check(value <= schema.get("maximum", math.inf), "maximum")
    check(value > schema.get("exclusiveMinimum", -math.inf), "exclusiveMinimum")
    check(value < schema.get("exclusiveMaximum", math.inf), "exclusiveMaximum")
    if "multipleOf" in schema:
        check(value % schema["multipleOf"] == 0, "multipleOf")


def _object(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    """An object with these properties, all of which are required by default."""
    required = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **more,
    }


_SHORT = {"type": "string", "maxLength": 8}
_INT = {"type": "integer", "minimum": -9, "maximum": 99}
_LEAVES: list[Any] = [
    _SHORT,
    _INT,
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "green", 3, None, True]},
    {"const": {"kind": "fixed", "items": [1, 2]}},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "format": "date"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 8},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"type": ["string", "null"], "maxLength": 5},
    {"type": "string", "enum": ["a b", "\u00e9t\u00e9", 'quote "', "back\\slash", "\u96ea"]},
]
_TREE = {
    "$defs": {
        "node": _object(
            {
                "value": {"type": "boolean"},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            }
        )
    },
    "$ref": "#/$defs/node",
}


def schemas() -> list[Schema]:
    """Return a hundred schemas: each kind of leaf in each kind of place, refs and recursion."""
    found: list[Schema] = [_TREE]
    for leaf in _LEAVES:
        found += [
            leaf,
            _object({"value": leaf, "other": _INT}),
            _object({"maybe": leaf, "sure": {"type": "boolean"}}, ["sure"]),
            {"type": "array", "items": leaf, "minItems": 1, "maxItems": 3},
            _object({"rows": {"type": "array", "items": _object({"cell": leaf}), "maxItems": 2}}),
            {"anyOf": [leaf, _object({"wrapped": leaf})]},
            {
                "$defs": {"leaf": leaf},
                **_object({"one": {"$ref": "#/$defs/leaf"}, "two": {"$ref": "#/$defs/leaf"}}),
            },
        ]
    found += [
        {"type": "array", "prefixItems": [_INT, _SHORT], "items": False, "minItems": 2},
        {
            "type": "object",
            "patternProperties": {"^x[0-9]$": _INT},
            "additionalProperties": False,
        },
    ]
    return found[:100]
