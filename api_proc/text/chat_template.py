"""Renders chats with the checkpoint's Jinja template in a sandbox, as transformers does."""

import json
import re
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from api_proc.text.template_meter import MeteredEnvironment, TooManySteps, limited, meter
from protocol.config import ConfigError

_COMPARES_CONTENT = re.compile(r"""content['"]?\]? is (not )?none""", re.IGNORECASE)

_EXAMPLE = "an example"


class ChatTemplateError(Exception):
    """The template rejects the messages; the error text comes from the template."""


class ChatTemplate:
    """The compiled template of one checkpoint."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self.source = source
        self._special_tokens = special_tokens
        environment = _prepared(MeteredEnvironment)
        try:
            parsed = environment.parse(source)
            self.is_simple = meter(parsed)
            """True if `max_steps` limits the time and memory of a rendering."""
            if self.is_simple:
                self._template = environment.from_string(parsed)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, SyntaxError) as error:  # the second one is Python's
            raise ConfigError("chat template: it is nested too deeply") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        """Compiled on first use, because the compiler evaluates constants, possibly without end."""
        return _prepared(ImmutableSandboxedEnvironment).from_string(self.source)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        extra: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        max_steps: int | None = None,
    ) -> str:
        """Return the text; TooManySteps: a simple template needs more than `max_steps`."""
        variables = self._special_tokens | (extra or {})
        try:
            with limited(max_steps):
                return self._template.render(
                    variables,
                    messages=[self._adapted(message) for message in messages],
                    tools=tools or None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                )
        except (TooManySteps, MemoryError):
            raise
        except Exception as error:  # a template is the checkpoint's code and may raise anything
            raise ChatTemplateError(str(error) or type(error).__name__) from error

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in the form that this template expects."""
        result = dict(message)
        if result.get("content") is None and not self._distinguishes_none:
            result["content"] = ""
        if result.get("content") and self._reads_parts:
            result["content"] = [{"type": "text", "text": result["content"]}]
        calls = result.get("tool_calls")
        if calls and self._reads_arguments_as_text:
            result["tool_calls"] = [_with_text_arguments(call) for call in calls]
        reasoning = result.get("reasoning_content")
        if reasoning is not None:
            result["reasoning"] = reasoning
            if not (calls and result["content"]):  # a template of gpt-oss rejects all three
                result["thinking"] = reasoning
        return result

    @cached_property
    def _reads_parts(self) -> bool:
        """True if contents must be lists of parts, as for some vision-language models.

        An example with a plain text is rendered: such a template fails, or omits the text.
        """

        def shows(content: object) -> bool:
            try:
                text = self._template.render(
                    dict(self._special_tokens),
                    messages=[{"role": "user", "content": content}],
                    tools=None,
                    add_generation_prompt=True,
                )
            except (TooManySteps, MemoryError):
                raise
            except Exception:  # a template may raise anything, for other reasons too
                return False
            return _EXAMPLE in text

        return not shows(_EXAMPLE) and shows([{"type": "text", "text": _EXAMPLE}])

    @cached_property
    def _distinguishes_none(self) -> bool:
        """True if the template compares the content with none; other templates would print it."""
        return _COMPARES_CONTENT.search(self.source) is not None

    @cached_property
    def _reads_arguments_as_text(self) -> bool:
        """True if the arguments of calls must be JSON text; most templates expect the object.

        An example with an object is rendered: a template that concatenates text fails, or prints
        the object as Python does.
        """
        function: dict[str, Any] = {"name": "f", "arguments": {"a_key": "a value"}}
        messages = [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": None if self._distinguishes_none else "",
                "tool_calls": [{"id": "123456789", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "123456789", "name": "f", "content": "b"},
        ]

        def rendered(arguments: object) -> str:
            function["arguments"] = arguments
            variables = dict(self._special_tokens)
            return self._template.render(
                variables, messages=messages, tools=None, add_generation_prompt=True
            )

        try:
            return "{'a_key': 'a value'}" in rendered({"a_key": "a value"})
        except (TooManySteps, MemoryError):
            raise
        except Exception:  # a template may raise anything, for other reasons too
            try:
                rendered('{"a_key": "a value"}')
            except (TooManySteps, MemoryError):
                raise
            except Exception:
                return False
            return True


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = _to_json(arguments)
    return call | {"function": function | {"arguments": arguments}}


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; rendering ignores it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _prepared(kind: type[ImmutableSandboxedEnvironment]) -> ImmutableSandboxedEnvironment:
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Encode without the HTML escapes of Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
