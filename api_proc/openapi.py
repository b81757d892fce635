"""The OpenAPI 3.1 document, made from the structs of the routes, and the page that renders it.

`OPERATIONS` describes every route of `api_proc.app`; a test compares the two.
"""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from api_proc.adapters import routes as adapter_routes
from api_proc.anthropic.bodies import MessagesBody, PromptBody
from api_proc.anthropic.objects import Message, MessageErrorResponse, StreamEvent, TokenCount
from api_proc.bodies import ChatBody, CompletionBody, DetokenizeBody, TemplateBody, TokenizeBody
from api_proc.http.connection import Connection
from api_proc.http.middleware import OPEN_PATHS
from api_proc.http.open_requests import Slot
from api_proc.openai import objects, token_routes
from api_proc.openai.generate import GenerateBody, Generated
from api_proc.openai.invocations import InvocationBody
from api_proc.operation import admin_routes as admin
from api_proc.operation import info_routes as info
from api_proc.operation import load_routes
from api_proc.pooling.classify import ClassificationResponse, ClassifyBody
from api_proc.pooling.embeddings import EmbeddingBody, EmbeddingResponse
from api_proc.pooling.scores import RerankBody, Reranking, ScoreBody, ScoreResponse
from api_proc.responses.body import ResponsesBody
from api_proc.responses.events import ResponseEvent
from api_proc.responses.objects import Deleted, InputTokens, Response
from api_proc.responses.routes import MAX_LISTED, ItemList
from api_proc.state import ApiState
from protocol.process.version import version


class Error(msgspec.Struct):
    """What was wrong with a request."""

    message: str
    type: str
    param: str | None
    """The field that has a bad value."""
    code: str | None


class ErrorResponse(msgspec.Struct):
    """The response to every request that fails."""

    error: Error


class Parameter(NamedTuple):
    """A parameter in the query or in the path."""

    name: str
    type: Any
    place: Literal["query", "path"] = "query"


class Operation(NamedTuple):
    """One route: what it does, takes and returns."""

    method: str
    path: str
    tag: str
    summary: str
    response: Any
    """A type that msgspec can describe; a string: the media type of something else."""
    request: type | None = None
    example: dict[str, Any] | None = None
    """A body of a request."""
    event: Any = None
    """What each server-sent event holds if the response is streamed."""
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = (401, 500)
    requires_body: bool = True
    """Whether a request needs a body, if `request` describes one."""
    error: type = ErrorResponse


_READS_BODY = (400, 401, 404, 408, 413, 415, 429, 500, 503)
_COMPUTES = (400, 401, 404, 408, 409, 413, 415, 429, 500, 503)
_GENERATES = (*_COMPUTES, 504)
_READS_RESPONSE = (400, 401, 404, 500, 503)
_CONTROLS = (400, 401, 408, 409, 413, 415, 429, 500, 503)
_READS_CONTROLS = (400, 401, 408, 413, 415, 500)
_MESSAGES = [{"role": "user", "content": "Hello"}]
_RESPONSE_ID = (Parameter("response_id", str, "path"),)
_HTML = "text/html"
_METRICS = _TEXT = "text/plain"
_LOADS = (400, 401, 408, 413, 415, 429, 500, 503)

OPERATIONS = (
    Operation(
        *("POST", "/v1/completions", "generate", "Continue one or more prompts."),
        *(objects.Completion, CompletionBody),
        {"prompt": "def main(", "max_tokens": 16},
        event=objects.Completion,
        errors=_GENERATES,
    ),
    Operation(
        *("POST", "/v1/chat/completions", "generate", "Answer a chat."),
        *(objects.ChatCompletion, ChatBody),
        {"messages": _MESSAGES, "max_tokens": 16},
        event=objects.ChatChunk,
        errors=_GENERATES,
    ),
    Operation(
        *("POST", "/v1/messages", "generate", "Answer a chat, in Anthropic's API."),
        *(Message, MessagesBody),
        {"messages": _MESSAGES, "max_tokens": 16},
        event=StreamEvent,
        errors=_GENERATES,
        error=MessageErrorResponse,
    ),
    Operation(
        *("POST", "/inference/v1/generate", "generate", "Continue token ids with token ids."),
        *(Generated, GenerateBody),
        {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 16}},
        event=Generated,
        errors=_GENERATES,
    ),
    Operation(
        *("POST", "/v1/messages/count_tokens", "text", "Count the tokens of a chat's prompt."),
        *(TokenCount, PromptBody),
        {"messages": _MESSAGES},
        errors=_READS_BODY,
        error=MessageErrorResponse,
    ),
    Operation(
        *("POST", "/v1/embeddings", "generate", "Return a vector for each text."),
        *(EmbeddingResponse, EmbeddingBody),
        {"input": ["a text", "another"]},
        errors=_COMPUTES,
    ),
    *(
        Operation(
            *("POST", path, "generate", "Score pairs of texts."),
            *(ScoreResponse, ScoreBody),
            {"text_1": "a question", "text_2": ["an answer", "another"]},
            errors=_COMPUTES,
        )
        for path in ("/score", "/v1/score")
    ),
    *(
        Operation(
            *("POST", path, "generate", "Sort documents by their relevance to a query."),
            *(Reranking, RerankBody),
            {"query": "a question", "documents": ["an answer", "another"]},
            errors=_COMPUTES,
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Operation(
        *("POST", "/classify", "generate", "Return the label of each text."),
        *(ClassificationResponse, ClassifyBody),
        {"input": ["a text", "another"]},
        errors=_COMPUTES,
    ),
    Operation(
        *("POST", "/invocations", "generate", "Do what the body's fields ask for."),
        *(dict[str, Any], InvocationBody),
        {"prompt": "def main(", "max_tokens": 16},
        event=dict[str, Any],
        errors=_GENERATES,
    ),
    Operation(
        *("POST", "/v1/responses", "generate", "Create a response."),
        *(Response, ResponsesBody),
        {"input": "Hello", "max_output_tokens": 16},
        event=ResponseEvent,
        errors=_GENERATES,
    ),
    Operation(
        *("POST", "/v1/responses/input_tokens", "text", "Count the tokens of a response's prompt."),
        *(InputTokens, ResponsesBody),
        {"input": "Hello"},
        errors=_READS_BODY,
    ),
    Operation(
        *("GET", "/v1/responses/{response_id}", "generate", "Return a stored response."),
        Response,
        parameters=_RESPONSE_ID,
        errors=_READS_RESPONSE,
    ),
    Operation(
        *("DELETE", "/v1/responses/{response_id}", "generate", "Delete a stored response."),
        Deleted,
        parameters=_RESPONSE_ID,
        errors=(*_READS_RESPONSE, 409),
    ),
    Operation(
        *("POST", "/v1/responses/{response_id}/cancel", "generate", "End a response."),
        Response,
        parameters=_RESPONSE_ID,
        errors=(*_READS_RESPONSE, 408, 413, 415, 429),
    ),
    Operation(
        *("GET", "/v1/responses/{response_id}/input_items", "generate"),
        *("List the input of a response.", ItemList),
        parameters=(
            *_RESPONSE_ID,
            Parameter("limit", Annotated[int, msgspec.Meta(ge=1, le=MAX_LISTED)]),
            Parameter("order", Literal["asc", "desc"]),
            Parameter("after", str),
        ),
        errors=_READS_RESPONSE,
    ),
    Operation(
        *("POST", "/abort_requests", "generate", "End open requests by their ids."),
        *(load_routes.Aborted, load_routes.AbortBody),
        {"request_ids": ["cmpl-1234"]},
        errors=_READS_BODY,
    ),
    Operation("GET", "/v1/models", "model", "List the names of the model.", info.ModelList),
    Operation(
        *("GET", "/v1/models/{name}", "model", "Describe the model.", info.ModelCard),
        parameters=(Parameter("name", str, "path"),),
        errors=(401, 404, 500),
    ),
    Operation(
        *("POST", "/tokenize", "text", "Return the token ids of a text or of a chat's prompt."),
        *(token_routes.Tokenized, TokenizeBody),
        {"prompt": "Hello"},
        errors=_READS_BODY,
    ),
    Operation(
        *("POST", "/detokenize", "text", "Return the text of token ids."),
        *(token_routes.Detokenized, DetokenizeBody),
        {"tokens": [5, 6, 7]},
        errors=_READS_BODY,
    ),
    Operation(
        *("POST", "/apply-template", "text", "Return the text of a chat's prompt."),
        *(token_routes.Rendered, TemplateBody),
        {"messages": _MESSAGES},
        errors=_READS_BODY,
    ),
    Operation(
        *("GET", "/tokenizer_info", "text", "Return tokenizer_config.json.", dict[str, Any]),
    ),
    Operation(
        *("GET", "/livez", "health", "Whether the HTTP server runs.", info.Alive), errors=(500,)
    ),
    Operation(
        *("GET", "/readyz", "health", "Whether requests are accepted.", info.Readiness),
        errors=(500, 503),
    ),
    Operation(
        *("GET", "/health", "health", "Whether accepted requests proceed.", info.Readiness),
        errors=(500, 503),
    ),
    *(
        Operation(
            *(method, "/ping", "health", "The same as /health, for SageMaker.", info.Readiness),
            errors=(500, 503),
        )
        for method in ("GET", "POST")
    ),
    Operation(
        *("GET", "/healthz", "health", "Whether open requests make progress."),
        load_routes.Progress,
        errors=(500, 503),
    ),
    Operation("GET", "/metrics", "health", "Metrics in the format of Prometheus.", _METRICS),
    Operation("GET", "/load", "health", "Count the open requests.", load_routes.Load),
    Operation("GET", "/v1/load", "health", "The same as /load.", load_routes.Load),
    Operation("GET", "/slots", "health", "List the oldest open requests.", list[Slot]),
    Operation("GET", "/version", "health", "The version of the server.", info.Version),
    Operation("GET", "/openapi.json", "health", "This document.", dict[str, Any], errors=(500,)),
    Operation("GET", "/docs", "health", "This document as a page.", _HTML, errors=(500,)),
    Operation(
        *("POST", "/pause", "admin", "Admit no new requests, or compute nothing."),
        *(admin.Paused, admin.PauseBody),
        {"mode": "new"},
        requires_body=False,
        parameters=(Parameter("mode", Literal["new", "all"]),),
        errors=_CONTROLS,
    ),
    Operation("POST", "/resume", "admin", "End a pause.", admin.Done, errors=_CONTROLS),
    Operation(
        *("GET", "/is_paused", "admin", "Whether the engine is paused.", admin.PauseState),
        errors=_READS_CONTROLS,
    ),
    Operation(
        *("POST", "/sleep", "admin", "Pause, and release the memory of the KV cache."),
        *(admin.Done, admin.SleepBody),
        {"level": 1},
        requires_body=False,
        parameters=(Parameter("level", Literal["1", "2"]),),
        errors=_CONTROLS,
    ),
    Operation(
        *("POST", "/wake_up", "admin", "End a sleep.", admin.Done, admin.WakeUpBody),
        {"tags": ["kv_cache"]},
        requires_body=False,
        parameters=(Parameter("tags", list[Literal["weights", "kv_cache"]]),),
        errors=_CONTROLS,
    ),
    Operation(
        *("GET", "/is_sleeping", "admin", "Whether the engine sleeps.", admin.SleepState),
        errors=_READS_CONTROLS,
    ),
    Operation(
        *("POST", "/reset_prefix_cache", "admin", "Drop all cached prefixes."),
        *(admin.Done, admin.ResetBody),
        {"reset_running_requests": True},
        requires_body=False,
        parameters=(Parameter("reset_running_requests", bool),),
        errors=_CONTROLS,
    ),
    Operation(
        *("POST", "/v1/load_lora_adapter", "admin", "Load a LoRA adapter under a name.", _TEXT),
        adapter_routes.LoadAdapterBody,
        {"lora_name": "sql", "lora_path": "/adapters/sql"},
        errors=_LOADS,
    ),
    Operation(
        *("POST", "/v1/unload_lora_adapter", "admin", "Forget a LoRA adapter.", _TEXT),
        adapter_routes.UnloadAdapterBody,
        {"lora_name": "sql"},
        errors=(*_LOADS, 404),
    ),
)

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
_PAGE = Path(__file__).with_name("docs.html")
_PAGE_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; connect-src 'self'; script-src 'unsafe-inline';"
        b" style-src 'unsafe-inline'",
    ),
    (b"x-content-type-options", b"nosniff"),
)


async def openapi_json(state: ApiState, connection: Connection) -> None:
    """GET /openapi.json: the document of this server's routes."""
    with_admin = state.config.api.enable_admin_routes
    await connection.send(200, _encoded_document(with_admin))


async def docs_page(state: ApiState, connection: Connection) -> None:
    """GET /docs: a page that renders the document; it loads nothing from elsewhere."""
    await connection.send(200, _page(), _PAGE_HEADERS, b"text/html; charset=utf-8")


@lru_cache
def _page() -> bytes:
    return _PAGE.read_bytes()


@lru_cache
def _encoded_document(with_admin: bool) -> bytes:
    operations = (item for item in OPERATIONS if with_admin or item.tag != "admin")
    return msgspec.json.encode(document(operations))


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


_REFERENCED = (objects.ChatTokenLogprob, objects.PromptLogprob)
"""Types of the items of encoded lists, whose descriptions name them."""
_TO_ID = str.maketrans({"/": "_", "{": None, "}": None, ".": "_", "-": "_"})
