"""Errors about JSON bodies, in OpenAI's shape: the field, what is wrong with it, and its value."""

import codecs
import re
from typing import Any

import msgspec

from api_proc.errors import ApiError, unsupported
from api_proc.http.choices import choices
from protocol.api_core import ErrorCode
from protocol.config.field_errors import read_field_error

_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
"""One step of a path: an index or a name."""
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_MAX_SEARCHED = 2**16
"""Largest body that is decoded again to show a wrong value."""
_LONGEST_SHOWN = 34
"""Longest JSON of a value that is shown, in bytes."""


def from_decoding(error: Exception, kind: Any = None, raw: bytes | None = None) -> ApiError:
    """Translate an error of msgspec's decoder for a type; `param` is the path of the field.

    The message shows the wrong value, if that is short and `raw` is the body.
    """
    text = str(error)
    if isinstance(error, RecursionError):
        return ApiError(400, "the JSON body is nested too deeply", code="too_deep")
    if not isinstance(error, msgspec.ValidationError):
        reason = f"the body is not valid JSON: {_not_json(text, raw)}"
        return ApiError(400, reason if raw != b"" else "the body is empty", code="invalid_json")
    problem = read_field_error(text)
    param = problem.place
    if problem.is_missing:
        if param == "prompt" and raw is not None and _has_name(raw, "prompt_embeds"):
            return unsupported("prompt_embeds")
        code, reason = "missing_required_parameter", problem.reason
    else:
        code = _code(param, problem.original)
        reason = choices(problem.original, kind, param) or (
            read_field_error(text, _shown(raw, param)).reason
        )
    return ApiError(400, f"{param or 'body'}: {reason}", param=param or None, code=code)


def _not_json(text: str, raw: bytes | None) -> str:
    """Return why a body is not JSON; for some characters the decoder's text is misleading."""
    if raw is None or len(raw) > _MAX_SEARCHED:
        return text
    if raw.startswith(codecs.BOM_UTF8):
        return "it begins with a byte order mark"
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"it is not UTF-8 (byte {error.start})"
    half = _HALF_PAIR.search(raw) if "truncated" in text else None
    return text if half is None else f"half of a surrogate pair (byte {half.start()})"


def _has_name(raw: bytes, name: str) -> bool:
    """Return whether a body that was decoded has a name whose value is not null."""
    try:
        value = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get(name)
    except (msgspec.DecodeError, UnicodeDecodeError):  # the name of a field is not valid
        return False
    return value is not None and bytes(value).strip() != b"null"


def _code(param: str, problem: str) -> str:
    if param == "prompt" and ("length >= 1" in problem or "`null`" in problem):
        return "empty_prompt"
    if param.startswith(("prompt[", "token_ids[")):
        return "empty_prompt" if "length >= 1" in problem else code_of_id(problem)
    return ErrorCode.INVALID


def code_of_id(problem: str) -> str:
    """Return the code of msgspec's error about a token id: `null` stands for none."""
    return ErrorCode.INVALID if "`null`" in problem else "token_out_of_range"


def _shown(raw: bytes | None, path: str) -> str | None:
    """Return the JSON text of a number or a short string in a body; None: there is none."""
    if not path or raw is None or len(raw) > _MAX_SEARCHED:
        return None
    try:
        value = msgspec.json.decode(raw)
        for index, name in _STEP.findall(path):
            value = value[int(index)] if index else value[name]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return None
    if isinstance(value, list | dict):
        return None
    shown = msgspec.json.encode(value)
    return shown.decode() if len(shown) <= _LONGEST_SHOWN else None
