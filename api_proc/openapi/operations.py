"""`OPERATIONS` describes every route of `api_proc.app`; a test compares the two."""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from api_proc.adapters import routes as adapter_routes
from api_proc.anthropic.bodies import MessagesBody, PromptBody
from api_proc.anthropic.objects import Message, MessageErrorResponse, StreamEvent, TokenCount
from api_proc.bodies import ChatBody, CompletionBody, DetokenizeBody, TemplateBody, TokenizeBody
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
