"""The tools of a request and the choice among them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from api_proc.errors import ApiError, invalid, unsupported

MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 2**20
"""Bound on the JSON of the tools in one request; a template needs about 30 ms for as much."""

ToolName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=256,
        pattern=r"^[A-Za-z0-9_.:/-]+\Z",
        description="1 to 256 of A-Z a-z 0-9 _ . : / -",
    ),
]


_OPEN_KEYWORDS = frozenset(
    (
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
        *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"),
    )
)


class FunctionTool(msgspec.Struct, frozen=True, omit_defaults=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments: an object without parameters that the tool does not name.

        A schema that combines others or mentions further properties is left as it is.
        """
        schema = {"type": "object"} | (
            {"properties": {}} if self.parameters is None else self.parameters
        )
        if "properties" in schema and _OPEN_KEYWORDS.isdisjoint(schema):
            schema["additionalProperties"] = False
        return schema


class Tool(msgspec.Struct, frozen=True):
    function: FunctionTool
    type: Literal["function"] = "function"

    @property
    def is_strict(self) -> bool:
        return bool(self.function.strict)

    def for_template(self) -> dict[str, Any]:
        """Return the tool as templates expect it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]


class ChosenFunction(msgspec.Struct, frozen=True):
    name: str


class AllowedTool(msgspec.Struct, frozen=True):
    function: ChosenFunction
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ToolChoiceObject(msgspec.Struct, frozen=True):
    """One tool by name, or some of the tools."""

    type: Literal["function", "allowed_tools"]
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | ToolChoiceObject


@dataclass(frozen=True)
class ToolUse:
    """Which tools the model may call in an answer."""

    tools: list[Tool]
    shown: list[Tool]
    """The tools that the prompt describes; a forced choice does not change the prompt."""
    is_required: bool
    is_parallel: bool

    @property
    def needs_grammar(self) -> bool:
        has_limit = self.is_required or not self.is_parallel
        return has_limit or any(tool.is_strict for tool in self.tools)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        return {tool.function.name: tool.function.schema for tool in self.tools}


def resolve_tools(
    tools: list[Tool] | None, choice: ToolChoice | None, is_parallel: bool | None
) -> ToolUse | None:
    """Return the tools that may be called, if any; a choice of absent tools is a 400."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice", "needs tools")
        return None
    if choice == "none":
        return None
    parallel = is_parallel is not False
    if choice is None or isinstance(choice, str):
        return ToolUse(tools, tools, choice == "required", parallel)
    if choice.type == "function":
        if choice.function is None:
            raise invalid("tool_choice.function", "the field is missing")
        chosen = _named(tools, [choice.function.name], "tool_choice.function.name")
        return ToolUse(chosen, tools, True, False)
    if choice.allowed_tools is None:
        raise invalid("tool_choice.allowed_tools", "the field is missing")
    names = [tool.function.name for tool in choice.allowed_tools.tools]
    chosen = _named(tools, names, "tool_choice.allowed_tools.tools")
    return ToolUse(chosen, chosen, choice.allowed_tools.mode == "required", parallel)


def _named(tools: list[Tool], names: list[str], param: str) -> list[Tool]:
    by_name = {tool.function.name: tool for tool in reversed(tools)}
    for name in names:
        if name not in by_name:
            raise invalid(param, f"{name[:100]!r} is not the name of a tool")
    if not names:
        raise invalid(param, "is empty")
    return [by_name[name] for name in dict.fromkeys(names)]


def check_tools(tools: list[Tool]) -> None:
    """Reject tools that are too large, and parameters that are not the schema of an object."""
    num_bytes = len(msgspec.json.encode(tools))
    if num_bytes > MAX_TOOLS_BYTES:
        raise invalid("tools", f"have {num_bytes} bytes together, more than {MAX_TOOLS_BYTES}")
    for i, tool in enumerate(tools):
        schema = tool.function.parameters
        if schema is None:
            continue
        where = f"tools[{i}].function.parameters"
        if schema.get("type", "object") != "object":
            raise invalid(f"{where}.type", "must be 'object'")
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            raise invalid(f"{where}.properties", "must be an object")
        for name, part in properties.items():
            if not isinstance(part, dict | bool):
                raise invalid(f"{where}.properties.{name[:100]}", "must be a schema")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise invalid(f"{where}.required", "must be a list of names")


def no_tool_format() -> ApiError:
    message = (
        "is not supported: the model's chat template has no known format for tool calls; "
        "choose one with --tool-call-parser"
    )
    return unsupported("tools", message)
