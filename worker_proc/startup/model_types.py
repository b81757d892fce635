"""The model types that transformers supports, read from its files without importing it.

Importing transformers and torch takes seconds on a busy machine. If the files cannot be read, no
model is refused.
"""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

_CONFIGURATIONS = "CONFIG_MAPPING_NAMES"
_GENERATING = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
)
_STATEMENTS = re.compile(
    rf"^(?:{'|'.join((_CONFIGURATIONS, *_GENERATING))})\b.*\n(?:[ )\]}}].*\n|\n)*", re.M
)
"""A statement begins with a list's name, and each further line with a space or a bracket."""
_FILES = ("auto_mappings.py", "configuration_auto.py", "modeling_auto.py")


class ModelTypes(NamedTuple):
    """The model types in transformers' lists."""

    known: frozenset[str]
    """Types with a configuration class."""
    generating: frozenset[str]
    """Types with a class that generates text."""


@cache
def model_types() -> ModelTypes | None:
    """Return the model types of the installed transformers; None: its lists are not found."""
    try:
        spec = importlib.util.find_spec("transformers")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "models" / "auto"
    named: dict[str, set[str]] = {}
    try:
        for file in _FILES:
            _read_names((folder / file).read_text(), named)
    except (OSError, ValueError, SyntaxError):
        return None
    generating = frozenset[str]().union(*(named.get(name, ()) for name in _GENERATING))
    known = frozenset(named.get(_CONFIGURATIONS, ()))
    return ModelTypes(known, generating) if known and generating else None


def _read_names(text: str, named: dict[str, set[str]]) -> None:
    """Add the strings of each list that a file assigns or updates, by the list's name.

    Only the statements that begin with the name of a list are parsed, a third of the files.
    """
    for found in _STATEMENTS.finditer(text):
        target: ast.expr
        match ast.parse(found.group()).body:
            case [ast.Assign(targets=[ast.Name() as target], value=value)]:
                pass
            case [
                ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name() as target)) as value)
            ]:
                pass
            case _:
                continue
        texts = (node.value for node in ast.walk(value) if isinstance(node, ast.Constant))
        named.setdefault(target.id, set()).update(t for t in texts if isinstance(t, str))
