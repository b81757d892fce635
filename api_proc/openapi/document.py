"""Makes an OpenAPI 3.1 document from operations."""

from collections.abc import Iterable
from typing import Any

import msgspec

from api_proc.http.middleware import OPEN_PATHS
from api_proc.openai import objects
from api_proc.openapi.operations import ErrorResponse, Operation
from protocol.process.version import version

_PHRASES = {
    400: "A field has a bad value.",
    401: "The API key is missing or wrong.",
    404: "The model or the response does not exist.",
    408: "The body did not arrive in time.",
    409: "It contradicts the present state: a request was aborted or has another body, blocks"
    " are in use.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too much is open; send the request again later.",
    500: "The server has failed.",
    503: "The engine cannot serve requests now.",
    504: "The request did not end within its `timeout`.",
}
_REFERENCED = (objects.ChatTokenLogprob, objects.PromptLogprob)
"""Types of the items of encoded lists, whose descriptions name them."""
_TO_ID = str.maketrans({"/": "_", "{": None, "}": None, ".": "_", "-": "_"})


def document(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes."""
    operations = list(operations)
    kinds = (kind for item in operations for kind in _types(item))
    types = {_key(kind): kind for kind in (*kinds, *_REFERENCED)}
    found, components = msgspec.json.schema_components(
        types.values(), ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(types, found, strict=True))
    paths: dict[str, Any] = {}
    for item in operations:
        paths.setdefault(item.path, {})[item.method.lower()] = _operation(item, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Troika", "version": version()},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _key(kind: Any) -> str:
    return repr(kind)


def _types(item: Operation) -> list[Any]:
    others = (p.type for p in item.parameters)
    kinds = (item.request, item.event, item.response, item.error, *others)
    return [kind for kind in kinds if kind is not None and not isinstance(kind, str)]


def _operation(item: Operation, schemas: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any]
    if isinstance(item.response, str):
        content = {item.response: {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": schemas[_key(item.response)]}}
    if item.event is not None:
        kinds = [schemas[_key(item.event)], schemas[_key(ErrorResponse)]]
        content["text/event-stream"] = {"schema": _event_schema(kinds)}
    answers: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    for status in item.errors:
        kind: Any = item.error
        if status == 503 and item.tag == "health":  # it has the same fields as the 200
            kind = item.response
        schema = {"application/json": {"schema": schemas[_key(kind)]}}
        answers[str(status)] = {"description": _PHRASES[status], "content": schema}
    result: dict[str, Any] = {
        "summary": item.summary,
        "operationId": f"{item.method.lower()}{item.path.translate(_TO_ID)}",
        "tags": [item.tag],
        "security": [] if item.path in OPEN_PATHS else [{}, {"key": []}],
        "responses": answers,
    }
    if item.parameters:
        result["parameters"] = [
            {
                "name": parameter.name,
                "in": parameter.place,
                "required": parameter.place == "path",
                "schema": schemas[_key(parameter.type)],
            }
            for parameter in item.parameters
        ]
    if item.request is not None:
        body: dict[str, Any] = {"schema": schemas[_key(item.request)]}
        if item.example is not None:
            body["example"] = item.example
        content = {"application/json": body}
        result["requestBody"] = {"required": item.requires_body, "content": content}
    return result


def _event_schema(kinds: list[Any]) -> dict[str, Any]:
    """Describe one server-sent event: JSON text of one of these kinds, or the mark of the end."""
    piece = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": kinds},
    }
    data = {"anyOf": [{"const": "[DONE]"}, piece]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}
