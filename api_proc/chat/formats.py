"""How a checkpoint writes reasoning and tool calls, described by markers and a syntax."""

import re
from dataclasses import dataclass

from api_proc.chat.call_syntax import CallSyntax
from api_proc.chat.harmony import ANALYSIS, END, MARKERS, HarmonyMessages

_TOKEN = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning at the start of the output, between two markers."""

    begin: str
    end: str


@dataclass(frozen=True)
class ToolFormat:
    """Calls in the output: `open begin CALL separator begin CALL ... close`.

    A grammar enforces just this text; a parser accepts variants, which it knows by markers.
    """

    syntax: CallSyntax
    markers: tuple[str, ...] = ()
    """Texts that begin calls."""
    opens: tuple[str, ...] = ()
    """Texts before calls that are not content."""
    ends: tuple[str, ...] = ()
    """Texts after and between calls that are not content."""
    bare_start: str = ""
    """An output that begins with this may be calls without a marker."""
    open: str = ""
    begin: str = ""
    separator: str = "\n"
    close: str = ""
    trigger: str = ""
    """The start of `open begin` that cannot be content; empty: calls have no marker."""
    ends_reasoning: bool = False
    """A marker ends reasoning too, because some models leave its end out."""
    id_characters: int | None = None
    """Length of ids that templates require."""

    @property
    def all_markers(self) -> tuple[str, ...]:
        return self.markers + self.opens + self.ends


@dataclass(frozen=True)
class Dialect:
    """The formats of one checkpoint."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None
    messages: HarmonyMessages | None = None
    """Replaces the other two."""

    @property
    def has_tools(self) -> bool:
        return self.tools is not None or self.messages is not None

    @property
    def has_reasoning(self) -> bool:
        return self.reasoning is not None or self.messages is not None

    @property
    def reasoning_markers(self) -> ReasoningFormat | None:
        """The texts around reasoning: of gpt-oss, around a message of analysis."""
        return self.reasoning if self.messages is None else ReasoningFormat(ANALYSIS, END)

    @property
    def call_markers(self) -> tuple[str, ...]:
        """The markers of calls that end reasoning without its own end marker."""
        if self.tools is None or not self.tools.ends_reasoning:
            return ()
        return self.tools.markers + self.tools.opens

    @property
    def markers(self) -> frozenset[str]:
        """The possible special tokens in all that a parser looks for; they must not be hidden."""
        found: tuple[str, ...] = ()
        if self.messages is not None:
            found += MARKERS
        if self.tools is not None:
            found += self.tools.all_markers + self.tools.syntax.inner_markers
        if self.reasoning is not None:
            found += (self.reasoning.begin, self.reasoning.end)
        return frozenset(name for text in found for name in _TOKEN.findall(text))
