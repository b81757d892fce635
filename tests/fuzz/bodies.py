"""JSON bodies: drawn from the schemas of an OpenAPI document, and damaged."""

import json
import random
import string
from collections.abc import Mapping
from typing import Any

from tests.fuzz.mutation import cut, edited, spliced

_MAX_DEPTH = 5
_FEW = 3
"""Items of a list, or names of an object, that are drawn at most."""
_FIELD_RATES = (0.0, 0.02, 0.05, 0.15)
"""Share of the optional fields that a body has: with many, some value is always bad."""
_INNER_RATE = 0.25
_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, -(2**70), 0.5, -0.0, 1e308, 1e-320),
    *("", "a", "\0", "\u2028", "\U0001f600", "x" * 2000, "<s>", "<|im_start|>", "..", "{{ 1 }}"),
    *([], {}, [[]], [None], {"": None}, [[[[[[[[]]]]]]]], [0] * 300, {"a": {"b": {"c": []}}}),
)
_KNOWN: Mapping[str, tuple[Any, ...]] = {
    "model": ("null", None),
    "max_tokens": (1, 5, 30),
    "max_completion_tokens": (1, 5, 30),
    "n": (1, 2, 3),
    "stream": (True, False),
    "stop": ("a", ["b", "cd"]),
    "temperature": (0, 0.7, 2),
    "seed": (1, -5),
    "prompt": ("abc", ["a", "b"], [5, 6, 7], [[5], [6, 7]]),
    "guided_regex": ("[a-z]{1,5}", "(a|b)+", "(", "a{1,9}b*", "(?=a)b"),
    "guided_choice": (["red", "green"],),
    "guided_json": ({"type": "boolean"}, {"type": "array", "items": {"type": "integer"}}),
    "guided_grammar": ('start: "a" | "b"', "start: start", "root ::= [a-z]+"),
    "grammar": ('root ::= "x" [0-9]+', "root ::="),
    "json_schema": ({"type": "null"}, {"name": "x", "schema": {"enum": [1, 2]}}),
    "type": ("json_schema", "json_object", "text", "function", "regex", "structural_tag"),
    "role": ("user", "assistant", "system", "tool"),
    "content": ("hello", None, [{"type": "text", "text": "x"}]),
    "tool_choice": ("auto", "none", "required", {"type": "function", "function": {"name": "f"}}),
    "parameters": ({"type": "object", "properties": {"a": {"type": "string"}}}, {}),
    "arguments": ("{}", '{"a": 1}', "{"),
    "name": ("f", "g", "x" * 65),
    "encoding_format": ("float", "base64"),
    "input": ("text", ["a", "b"], [5, 6]),
}
"""Values under which a field has an effect."""


class Bodies:
    """Draws bodies from the schemas of one document."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._schemas: Mapping[str, Any] = document["components"]["schemas"]

    def draw(self, schema: Any, example: Any, rng: random.Random) -> Any:
        """Return a valid body, or one that is nearly valid: the example, with further fields."""
        if rng.random() < 0.1 or not isinstance(example, dict):
            return self._value(schema, rng, 0)
        body, rate = dict(example), rng.choice(_FIELD_RATES)
        for name, part in self._resolved(schema).get("properties", {}).items():
            if rng.random() < rate:
                body[name] = self._field(name, part, rng, 0)
        return body

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        while isinstance(schema, dict) and "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        return schema if isinstance(schema, dict) else {}

    def _field(self, name: str, schema: Any, rng: random.Random, depth: int) -> Any:
        if name in _KNOWN and rng.random() < 0.7:
            return rng.choice(_KNOWN[name])
        return self._value(schema, rng, depth)

    def _value(self, schema: Any, rng: random.Random, depth: int) -> Any:
        schema = self._resolved(schema)
        if depth > _MAX_DEPTH:
            return None
        for name in ("anyOf", "oneOf", "allOf"):
            if name in schema:
                return self._value(rng.choice(schema[name]), rng, depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        kind = schema.get("type")
        match rng.choice(kind) if isinstance(kind, list) else kind:
            case "object":
                return self._object(schema, rng, depth)
            case "array":
                least = schema.get("minItems", 0)
                length = least + int(rng.random() * (1 + min(_FEW, schema.get("maxItems", _FEW))))
                return [self._value(schema.get("items"), rng, depth + 1) for _ in range(length)]
            case "string":
                return _string(schema, rng)
            case "integer":
                return _integer(schema, rng)
            case "number":
                return _integer(schema, rng) + rng.choice((0, 0.5, 0.25))
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
        return rng.choice(_ODD)

    def _object(self, schema: Mapping[str, Any], rng: random.Random, depth: int) -> Any:
        found = {}
        required = schema.get("required", ())
        for name, part in schema.get("properties", {}).items():
            if name in required or rng.random() < _INNER_RATE:
                found[name] = self._field(name, part, rng, depth + 1)
        more = schema.get("additionalProperties")
        if isinstance(more, dict):
            for _ in range(int(rng.random() * _FEW)):
                found[str(int(rng.random() * 300))] = self._value(more, rng, depth + 1)
        return found


def _string(schema: Mapping[str, Any], rng: random.Random) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength", 20)
    if rng.random() < 0.05:
        return "é" * (most + 1 if most < 5000 else 0)
    length = min(least + int(rng.random() * 12), most)
    return "".join(rng.choices(string.ascii_letters + ' \n"\\{}<>|_é\U0001f600', k=length))


def _integer(schema: Mapping[str, Any], rng: random.Random) -> int:
    least = int(schema.get("minimum", schema.get("exclusiveMinimum", 0)))
    most = int(schema.get("maximum", schema.get("exclusiveMaximum", least + 1000)))
    if rng.random() < 0.15:
        return rng.choice((least - 1, least, most, most + 1))
    return least + int(rng.random() * min(most - least + 1, 40))


def damaged(value: Any, rng: random.Random) -> Any:
    """Change one place: another value, less, or more."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        match int(rng.random() * 8):
            case 0:
                return {key: part for key, part in value.items() if key != name}
            case 1:
                return {**value, name + rng.choice("s_- \0"): value[name]}
            case _:
                return {**value, name: damaged(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = int(rng.random() * len(value))
        repeated = [value[place]] * (300 if rng.random() < 0.1 else 1)
        changed = repeated if rng.random() < 0.3 else [damaged(value[place], rng)]
        return [*value[:place], *changed, *value[place + 1 :]]
    return rng.choice(_ODD)


def encoded(body: Any, rng: random.Random) -> bytes:
    """Encode a body as JSON, now and then with other spaces, repeated names, or changed bytes."""
    text = json.dumps(
        body,
        ensure_ascii=rng.random() < 0.5,
        indent=2 if rng.random() < 0.05 else None,
        allow_nan=True,
    )
    data = text.encode("utf-8", "surrogatepass")
    match int(rng.random() * 40):
        case 0:
            return edited(data, rng)
        case 1:
            return cut(data, rng)
        case 2:
            return spliced(data, data, rng)
        case 3:
            return data[:-1] + b',"max_tokens":1,"max_tokens":2}'
        case 4:
            return text.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")), "surrogatepass")
        case 5:
            return data.replace(b"0", b"NaN", 1) + rng.choice((b"", b" ", b"\0", b"{}"))
        case 6:
            depth = 1 << int(rng.random() * 14)
            return data[:-1] + b',"deep":' + b"[" * depth + b"]" * depth + b"}"
        case 7:
            return rng.randbytes(int(rng.random() * 200))
        case _:
            return data
