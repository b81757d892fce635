"""Errors of grammars, with messages for the author of a grammar."""

import re

NO_TOKEN = "NoExtensionBias"
"""The beginning of llguidance's error where no token may follow."""
_SCHEMA_ERROR = "failed to compile JSON schema: "
_REGEX_REPORT = re.compile(
    r'(?:invalid regex ".*" \(in [^)]*\): )?regex parse error:\n {4}(?P<regex>.*)\n'
    r" {4}(?P<before> *)\^.*\nerror: (?P<reason>.*)"
)
"""Matches the regular expression, the mark below the faulty place, and the reason."""
_SHOWN_CHARS = 40
"""Number of characters of a regular expression shown on each side of that place."""
_DETAILS_HIDDEN = "\n<non-verbose/>"
"""Replaces the state of the parser, which `verbose_errors` would show."""
_SOURCE_LINES = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_UNIMPLEMENTED = "Unimplemented keys"
_LENIENT = '; "x-guidance": {"lenient": true} in the schema leaves them out'


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message is for its author."""


def in_words(error: str, *, has_begun: bool = False) -> str:
    """Explain llguidance's terse errors, and remove source lines that the request does not have.

    `has_begun`: tokens have matched the grammar before. A schema or a regular expression may be
    part of a grammar of the server, for example after reasoning.
    """
    if error.startswith(NO_TOKEN):
        if has_begun:
            return "the model has no token for what the grammar demands next"
        return "nothing matches the grammar: it is empty, or refers to itself without an end"
    report = _REGEX_REPORT.search(error)
    if report is not None:
        return _in_one_line(report["regex"], len(report["before"]), report["reason"])
    error = error.removesuffix(_DETAILS_HIDDEN)
    cause = error.partition(_SCHEMA_ERROR)[2]
    words = _SOURCE_LINES.sub("", cause).rstrip() if cause else error.rstrip()
    return words + _LENIENT if words.startswith(_UNIMPLEMENTED) else words


def _in_one_line(regex: str, place: int, reason: str) -> str:
    """Describe an error in a regular expression, showing the part around it."""
    first, last = max(0, place - _SHOWN_CHARS), place + _SHOWN_CHARS
    shown = f"{'…' * (first > 0)}{regex[first:last]}{'…' * (last < len(regex))}"
    return f'invalid regex "{shown}", character {place + 1}: {reason}'
