"""A task: a question, the tools at hand, the calls that it needs, their results and the answer."""

from dataclasses import dataclass, field
from typing import Any

Schema = dict[str, Any]


def function(name: str, description: str, properties: Schema, required: list[str]) -> Schema:
    """Return a tool as a request defines it."""
    definition: Schema = {"name": name}
    if description:
        definition["description"] = description
    definition["parameters"] = {"type": "object", "properties": properties}
    if required:
        definition["parameters"]["required"] = required
    return {"type": "function", "function": definition}


def generated(tool: Schema) -> Schema:
    """Return a tool in the style of libraries that make schemas of classes."""
    definition = dict(tool["function"])
    parameters = definition["parameters"]
    properties = {
        key: {"title": key.replace("_", " ").title()} | dict(sorted(schema.items()))
        for key, schema in parameters["properties"].items()
    }
    required = {"required": parameters["required"]} if "required" in parameters else {}
    title = {"title": definition["name"]}
    definition["parameters"] = {"properties": properties} | required | title | {"type": "object"}
    return {"type": "function", "function": definition}


def closed(tool: Schema) -> Schema:
    """Return a tool that allows no other parameters, as strict ones are written."""
    definition = tool["function"]
    parameters = definition["parameters"] | {"additionalProperties": False}
    return {"type": "function", "function": definition | {"parameters": parameters}}


def name_of(tool: Schema) -> str:
    return str(tool["function"]["name"])


@dataclass(frozen=True)
class Call:
    """A call and what the tool returned."""

    name: str
    arguments: dict[str, Any]
    result: str

    @property
    def description(self) -> str:
        """The call in words, as the model's reasoning has it."""
        parts = [f"{key} {_spoken(value)}" for key, value in self.arguments.items()]
        return self.name + (" with " + " and ".join(parts) if parts else "")


@dataclass(frozen=True)
class Task:
    question: str
    tools: list[Schema]
    """Those that the task needs; conversations add others."""
    calls: list[Call]
    answer: str
    thought: str = ""
    """Reasoning before an answer without calls."""
    topic: str = ""
    """Tasks with the same topic are not each other's distractors."""
    history: list[Schema] = field(default_factory=list)
    """Messages that the question refers to."""


def _spoken(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_spoken, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
