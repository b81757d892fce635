"""The table of model families: their formats, and how to find the one of a checkpoint.

Names are those of vLLM's parsers where it has one. A family is chosen by name, or by texts that
occur in the checkpoint's chat template.
"""

# ruff: noqa: RUF001

import re
from collections.abc import Sequence
from dataclasses import dataclass

from api_proc.chat.formats import Dialect, ReasoningFormat, ToolFormat
from api_proc.chat.harmony import HarmonyMessages
from api_proc.chat.json_calls import JsonCalls
from api_proc.chat.named_calls import NamedCalls
from api_proc.chat.python_calls import PythonCalls
from api_proc.chat.xml_calls import XmlCalls
from protocol.config import ConfigError

AUTO, OFF = "auto", "off"


@dataclass(frozen=True)
class ToolFamily:
    names: tuple[str, ...]
    pattern: str
    """Regular expression that finds the family in a chat template."""
    form: ToolFormat | HarmonyMessages


@dataclass(frozen=True)
class ReasoningFamily:
    names: tuple[str, ...]
    pattern: str
    form: ReasoningFormat | HarmonyMessages


_HARMONY = HarmonyMessages()
# The first family whose pattern is found is taken, so that those with more particular ones precede.
TOOL_FAMILIES = (
    ToolFamily(("openai", "gpt_oss"), r"<\|channel\|>[\s\S]*<\|message\|>", _HARMONY),
    ToolFamily(
        ("kimi_k2",),
        r"<\|tool_call_begin\|>|<\|im_system\|>tool_declare",
        ToolFormat(
            NamedCalls("<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.", True),
            markers=("<|tool_call_begin|>",),
            opens=("<|tool_calls_section_begin|>",),
            ends=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            open="<|tool_calls_section_begin|>",
            begin="<|tool_call_begin|>",
            separator="",
            close="<|tool_calls_section_end|>",
            trigger="<|tool_calls_section_begin|>",
            ends_reasoning=True,
        ),
    ),
    ToolFamily(
        ("deepseek_v3",),
        r"<｜tool▁call▁begin｜>[\s\S]*```json",
        ToolFormat(
            NamedCalls("\n```json\n", "\n```<｜tool▁call▁end｜>", "function<｜tool▁sep｜>"),
            ends=("\n```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            open="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁call▁begin｜>",
            close="<｜tool▁calls▁end｜>",
            markers=("<｜tool▁call▁begin｜>",),
            opens=("<｜tool▁calls▁begin｜>",),
            trigger="<｜tool▁calls▁begin｜>",
            ends_reasoning=True,
        ),
    ),
    ToolFamily(
        ("deepseek_v31",),
        r"<｜tool▁call▁begin｜>",
        ToolFormat(
            NamedCalls("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
            ends=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            open="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁call▁begin｜>",
            separator="",
            close="<｜tool▁calls▁end｜>",
            markers=("<｜tool▁call▁begin｜>",),
            opens=("<｜tool▁calls▁begin｜>",),
            trigger="<｜tool▁calls▁begin｜>",
            ends_reasoning=True,
        ),
    ),
    ToolFamily(
        ("glm45", "glm47"),
        r"<arg_key>",
        ToolFormat(
            XmlCalls(
                name_end="\n",
                key_begin="<arg_key>",
                key_end="</arg_key>",
                value_begin="\n<arg_value>",
                value_end="</arg_value>",
                end="</tool_call>",
                separator="\n",
            ),
            markers=("<tool_call>",),
            ends=("</tool_call>",),
            begin="<tool_call>",
            trigger="<tool_call>",
        ),
    ),
    ToolFamily(
        ("qwen3_coder", "qwen3_xml"),
        r"<function=[\s\S]*<parameter=",
        ToolFormat(
            XmlCalls(
                name_end=">\n",
                key_begin="<parameter=",
                key_end=">",
                value_begin="\n",
                value_end="\n</parameter>",
                end="</function>",
                separator="\n",
            ),
            markers=("<function=",),
            opens=("<tool_call>",),
            ends=("</tool_call>",),
            begin="<tool_call>\n<function=",
            separator="\n</tool_call>\n",
            close="\n</tool_call>",
            trigger="<tool_call>",
        ),
    ),
    ToolFamily(
        ("mistral", "mistral_args"),
        r"\[ARGS\]",
        ToolFormat(
            NamedCalls("[ARGS]", ""),
            markers=("[TOOL_CALLS]",),
            begin="[TOOL_CALLS]",
            separator="",
            trigger="[TOOL_CALLS]",
            id_characters=9,
        ),
    ),
    ToolFamily(
        ("mistral", "mistral_list"),
        r"\[TOOL_CALLS\]",
        ToolFormat(
            JsonCalls(),
            markers=("[TOOL_CALLS]",),
            open="[TOOL_CALLS][",
            separator=", ",
            close="]",
            trigger="[TOOL_CALLS]",
            id_characters=9,
        ),
    ),
    ToolFamily(
        ("phi4_mini_json",),
        r"functools\[|<\|/tool\|>",
        ToolFormat(
            JsonCalls(),
            markers=("functools[", "<|tool_call|>"),
            ends=("<|/tool_call|>",),
            open="<|tool_call|>[",
            separator=", ",
            close="]<|/tool_call|>",
            trigger="<|tool_call|>",
        ),
    ),
    ToolFamily(
        ("granite",),
        r"<\|start_of_role\|>[\s\S]*<\|tool_call\|>",
        ToolFormat(
            JsonCalls(),
            markers=("<|tool_call|>", "<tool_call>"),
            ends=("</tool_call>",),
            open="<|tool_call|>[",
            separator=", ",
            close="]",
            trigger="<|tool_call|>",
        ),
    ),
    ToolFamily(
        ("hermes", "qwen25", "qwen3"),
        r"<tool_call>",
        ToolFormat(
            JsonCalls(end="\n</tool_call>"),
            markers=("<tool_call>",),
            ends=("</tool_call>",),
            begin="<tool_call>\n",
            trigger="<tool_call>",
        ),
    ),
    ToolFamily(
        ("pythonic", "llama4_pythonic"),
        r"<\|python_start\|>|func_name1\(",
        ToolFormat(
            PythonCalls(),
            markers=("<|python_start|>",),
            ends=("<|python_end|>",),
            bare_start="[",
            open="[",
            separator=", ",
            close="]",
        ),
    ),
    ToolFamily(
        ("llama3_json", "llama4_json"),
        r"<\|python_tag\|>",
        ToolFormat(
            JsonCalls(arguments_key="parameters"),
            markers=("<|python_tag|>",),
            bare_start="{",
            separator="; ",
        ),
    ),
)

REASONING_FAMILIES = (
    ReasoningFamily(("openai_gptoss", "gpt_oss"), TOOL_FAMILIES[0].pattern, _HARMONY),
    ReasoningFamily(("mistral",), r"\[THINK\]", ReasoningFormat("[THINK]", "[/THINK]")),
    ReasoningFamily(
        ("granite",),
        r"Here is my thought process:",
        ReasoningFormat("Here is my thought process:", "Here is my response:"),
    ),
    ReasoningFamily(
        ("deepseek_r1", "qwen3", "glm45", "kimi_k2", "deepseek_v3"),
        r"</?think>",
        ReasoningFormat("<think>", "</think>"),
    ),
)


def find_dialect(template: str | None, tool_parser: str, reasoning_parser: str) -> Dialect:
    """Return the formats by name; "auto" finds them in the chat template, "off" has none."""
    tools = _find("tool_call_parser", TOOL_FAMILIES, tool_parser, template or "")
    reasoning = _find("reasoning_parser", REASONING_FAMILIES, reasoning_parser, template or "")
    if tools is _HARMONY or reasoning is _HARMONY:
        return Dialect(messages=_HARMONY)
    assert tools is None or isinstance(tools, ToolFormat)
    assert reasoning is None or isinstance(reasoning, ReasoningFormat)
    return Dialect(reasoning, tools)


def _find(
    setting: str, families: Sequence[ToolFamily | ReasoningFamily], name: str, template: str
) -> ToolFormat | ReasoningFormat | HarmonyMessages | None:
    """Return the format of the first family that has the name and is found in the template.

    Without one, the last that has the name: a name may stand for two versions of a format.
    """
    if name == OFF:
        return None
    named = [family for family in families if name in (AUTO, *family.names)]
    if not named:
        known = ", ".join(sorted({known for family in families for known in family.names}))
        raise ConfigError(f"`{setting}` {name!r} must be auto, off or one of {known}")
    found = [family for family in named if re.search(family.pattern, template)]
    if not found and name == AUTO:
        return None
    return (found or named[-1:])[0].form
