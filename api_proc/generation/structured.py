"""Structured output: the fields that constrain an output become one grammar for the engine.

The formats of several servers are supported: OpenAI's `response_format`, vLLM's
`structured_outputs` and `guided_*`, llama.cpp's `grammar` and `json_schema`. The worker compiles
the grammar; if it rejects the grammar, the answer is a 400 that names the field here.
"""

import json
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from api_proc.chat.lark import nested_json
from api_proc.errors import invalid, unsupported
from protocol.api_core import RequestError
from protocol.config.field_errors import json_error_text
from protocol.sampling import MAX_GRAMMAR_CHARS, Grammar, GrammarKind

MAX_CHOICES = 4096
MAX_SENT_CHARS = 128 * MAX_GRAMMAR_CHARS
"""Most characters of a grammar times the number of sequences, each of which sends it to the core.
128 sequences, as many as one prompt can have, may have the largest grammar."""
MAX_TAGS = 128

Schema = dict[str, Any] | bool | str
"""A JSON schema, or a string that contains one."""
Choices = Annotated[list[str], Meta(max_length=MAX_CHOICES)]
_CONSTRAINTS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "grammar"),
)
_JSON_OBJECT: dict[str, Any] = {"type": "object"}
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
"""Values of `type` in a `response_format`."""


class JsonSchema(msgspec.Struct, frozen=True):
    """`response_format.json_schema`. The output always follows it, regardless of `strict`."""

    schema: Schema | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TagStructure(msgspec.Struct, frozen=True):
    """A kind of tag in a structural tag: its content follows a schema."""

    begin: str
    end: str
    schema: Schema | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's `response_format`, with vLLM's structural tags and llama.cpp's `schema`."""

    type: str
    json_schema: JsonSchema | None = None
    schema: Schema | None = None
    structures: Annotated[list[TagStructure], Meta(max_length=MAX_TAGS)] | None = None
    triggers: Annotated[list[str], Meta(max_length=MAX_TAGS)] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's `structured_outputs`: one constraint, and options for JSON."""

    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class Constrained(Protocol):
    """The body fields that constrain its output."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Schema | None
    guided_regex: str | None
    guided_choice: Choices | None
    guided_grammar: str | None
    guided_whitespace_pattern: str | None
    json_schema: Schema | None
    grammar: str | None


def grammar_of(body: Constrained) -> Grammar | None:
    """Return the grammar of a body; a 400 if a constraint is empty, or if several differ.

    Clients for old and new versions of vLLM name the same constraint in two fields.
    """
    params = _constraining(body)
    if not params:
        return None
    first, *others = params
    grammar = _translate(body, first)
    _check_length(grammar.source, first)
    for param in others:
        if _translate(body, param) != grammar:
            raise invalid(param, f"cannot be combined with {first}: both confine the output")
    return grammar


def grammar_of_outputs(form: StructuredOutputs) -> Grammar:
    """Return the grammar of `structured_outputs` alone; errors as `grammar_of`."""
    grammar = _from_structured_outputs(form)
    _check_length(grammar.source, "structured_outputs")
    return grammar


def name_field(error: RequestError, body: Constrained) -> RequestError:
    """Return an error about the grammar, with the name of the field that it came from."""
    if error.param != "grammar":
        return error
    param = _source_field(body)
    return RequestError(error.code, f"{param}: {error.message}", param)


def check_copies(grammar: Grammar | None, num_sequences: int, body: Constrained) -> None:
    """Reject a grammar whose copies are too large together. ApiError: names the field."""
    if grammar is not None and len(grammar.source) * num_sequences > MAX_SENT_CHARS:
        message = (
            f"makes a grammar of {len(grammar.source)} characters for each of {num_sequences} "
            f"sequences, together more than {MAX_SENT_CHARS}"
        )
        raise invalid(_source_field(body), message)


def _source_field(body: Constrained) -> str:
    """Return the field that constrains the output: "tools" if none does, as it is their calls."""
    return next(iter(_constraining(body)), "tools")


def _constraining(body: Constrained) -> list[str]:
    params = [name for name in _CONSTRAINTS if getattr(body, name) is not None]
    if body.response_format is not None and body.response_format.type != "text":
        params.insert(0, "response_format")
    return params


def _translate(body: Constrained, param: str) -> Grammar:
    whitespace = body.guided_whitespace_pattern
    value = getattr(body, param)
    if param == "response_format":
        return _from_response_format(value)
    if param == "structured_outputs":
        return _from_structured_outputs(value)
    if param in ("guided_json", "json_schema"):
        return _from_schema(value, param, whitespace)
    if param == "guided_regex":
        return _from_regex(value, param)
    if param == "guided_choice":
        return _from_choices(value, param)
    return Grammar(GrammarKind.EBNF, _filled(value, param))


def _from_response_format(form: ResponseFormat) -> Grammar:
    if form.type == "json_object":
        return _from_schema(_or_object(form.schema), "response_format.schema")
    if form.type == "json_schema":
        if form.json_schema is None and form.schema is not None:
            return _from_schema(form.schema, "response_format.schema")
        param = "response_format.json_schema"
        if form.json_schema is None or form.json_schema.schema is None:
            raise invalid(f"{param}.schema", "the field is missing", "missing_required_parameter")
        return _from_schema(form.json_schema.schema, f"{param}.schema")
    if form.type == "structural_tag":
        return _from_structural_tag(form, "response_format")
    problem = f"of type {form.type[:64]!r} is not supported; types: {', '.join(_FORMATS)}"
    raise unsupported("response_format", problem)


def _from_structured_outputs(form: StructuredOutputs) -> Grammar:
    param = "structured_outputs"
    names = ("json", "regex", "choice", "grammar", "structural_tag")
    given = [name for name in names if getattr(form, name) is not None]
    given += ["json_object"] if form.json_object else []
    if len(given) != 1:
        what = f"has {' and '.join(given)}" if given else "is empty"
        choices = f"{', '.join(names)} and json_object"
        raise invalid(param, f"{what}: exactly one of {choices} must be set")
    if form.disable_additional_properties:
        raise unsupported(f"{param}.disable_additional_properties")
    [name] = given
    where, value = f"{param}.{name}", getattr(form, name)
    if name in ("json", "json_object"):
        schema = value if name == "json" else _JSON_OBJECT
        pattern = form.whitespace_pattern
        return _from_schema(schema, where, pattern, compact=bool(form.disable_any_whitespace))
    if name == "regex":
        return _from_regex(value, where)
    if name == "choice":
        return _from_choices(value, where)
    if name == "grammar":
        return Grammar(GrammarKind.EBNF, _filled(value, where))
    _check_length(value, where)
    try:
        tag = msgspec.json.decode(_filled(value, where), type=ResponseFormat)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(where, f"is not a structural tag: {json_error_text(error)}") from error
    return _from_structural_tag(tag, where)


def _from_regex(regex: str, param: str) -> Grammar:
    """Return the grammar of a regular expression; llguidance would drop a backslash at its end."""
    num_backslashes = len(regex) - len(regex.rstrip("\\"))
    if num_backslashes % 2:
        raise invalid(param, "ends with a backslash that escapes nothing")
    return Grammar(GrammarKind.REGEX, _filled(regex, param))


def _or_object(schema: Schema | None) -> Schema:
    return _JSON_OBJECT if schema is None else schema


def _from_schema(
    schema: Schema, param: str, whitespace: str | None = None, *, compact: bool = False
) -> Grammar:
    """Return the grammar of a schema; `compact`: without whitespace between JSON tokens."""
    value = _decoded(schema, param)
    if value is False:
        raise invalid(param, "is false, a schema that no value satisfies")
    if value is True:
        value = {}  # the compiler adds its own options to an object
    if compact or whitespace is not None:
        options = value.get("x-guidance", {})
        if not isinstance(options, dict):
            raise invalid(f"{param}.x-guidance", "must be an object")
        options = {**options, "whitespace_pattern": None if compact else whitespace}
        if compact:
            options["whitespace_flexible"] = False
        value = {**value, "x-guidance": options}
    return Grammar(GrammarKind.JSON_SCHEMA, _json(value))


def _decoded(schema: Schema, param: str) -> dict[str, Any] | bool:
    value: Any = schema
    if isinstance(schema, str):
        _check_length(schema, param)
        try:
            value = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise invalid(param, f"is not the JSON text of a schema: {error}") from error
    if value == {}:
        raise invalid(param, 'is empty; the schema of any object is {"type": "object"}')
    if not isinstance(value, dict | bool):
        raise invalid(param, "must be a JSON schema, which is an object")
    return value


def _from_choices(choices: list[str], param: str) -> Grammar:
    if not choices:
        raise invalid(param, "must hold at least one choice")
    for i, choice in enumerate(choices):
        if not choice:
            raise invalid(f"{param}[{i}]", "must hold at least one character")
    # One terminal holds all choices: the compiler refuses rules with thousands of alternatives.
    source = f"start: CHOICE\nCHOICE: {' | '.join(map(_quoted, choices))}\n"
    return Grammar(GrammarKind.LARK, source)


def _from_structural_tag(form: ResponseFormat, param: str) -> Grammar:
    """Return a grammar of free text in which each trigger begins one of the tags."""
    if form.format is not None:
        raise unsupported(f"{param}.format", "is not supported; use structures and triggers")
    if not form.structures or not form.triggers:
        raise invalid(param, "a structural tag needs at least one of structures and of triggers")
    lines = ["TEXT: /(.|\\n)*/"]
    rules = []
    for i, trigger in enumerate(form.triggers):
        lines.append(
            f"trigger_{i}[lazy]: TEXT {_quoted(_filled(trigger, f'{param}.triggers[{i}]'))}"
        )
    for i, tag in enumerate(form.structures):
        where = f"{param}.structures[{i}]"
        starts = [n for n, trigger in enumerate(form.triggers) if tag.begin.startswith(trigger)]
        if not starts:
            raise invalid(f"{where}.begin", "must start with one of the triggers")
        rest = tag.begin[len(form.triggers[starts[0]]) :]
        schema = _decoded(_or_object(tag.schema), f"{where}.schema")
        parts = [f"trigger_{starts[0]}", _quoted(rest), nested_json(schema), _quoted(tag.end)]
        rules.append(f"tag_{i}")
        lines.append(f"tag_{i}: {' '.join(part for part in parts if part != _quoted(''))}")
    return Grammar(
        GrammarKind.LARK, "\n".join([f"start: ({' | '.join(rules)})* text", "text: TEXT", *lines])
    )


def _check_length(text: str, param: str) -> None:
    """Reject a long text before it is decoded to many times its size."""
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid(param, f"has {len(text)} characters, more than {MAX_GRAMMAR_CHARS}")


def _filled(text: str, param: str) -> str:
    if not text.strip():
        raise invalid(param, "must not be empty")
    return text


def _quoted(text: str) -> str:
    """Return a Lark string literal."""
    return json.dumps(text, ensure_ascii=False)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
