"""The error of a setting that cannot be used."""

import re
from collections.abc import Callable

_MARKED = re.compile(r"`([a-z]\w*)`")
"""The name of a setting in the text of an error."""


class ConfigError(Exception):
    """A setting that cannot be used; the text names it and its bound.

    Names of settings may be in backticks, which `str` leaves out.
    """

    def __init__(self, text: str) -> None:
        super().__init__(_MARKED.sub(r"\1", text))
        self._text = text

    def spelled(self, spell: Callable[[str], str]) -> str:
        """Return the text, with each marked name as `spell` writes it."""
        return _MARKED.sub(lambda match: spell(match[1]), self._text)
