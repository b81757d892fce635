"""Routes of other servers that this one lacks, with what a client can do instead."""

_COMPLETIONS = "use POST /v1/completions"
_CHAT = "use POST /v1/chat/completions"
_EMBEDDINGS = "use POST /v1/embeddings"
_MODELS = "use GET /v1/models"
_TEXT_ONLY = "only text is supported"
_BATCHES = "troika run-batch answers a file of requests"
_STORED = "use previous_response_id of POST /v1/responses"
_WEIGHTS = "an engine reads weights only at its start"

_OLLAMA = {
    "/api/chat": _CHAT,
    "/api/generate": _COMPLETIONS,
    "/api/embed": _EMBEDDINGS,
    "/api/embeddings": _EMBEDDINGS,
    "/api/tags": _MODELS,
    "/api/ps": _MODELS,
    "/api/show": _MODELS,
    "/api/version": "use GET /version",
    "/api/pull": "the model is named when the server starts",
}
_LLAMA_CPP = {
    "/completion": _COMPLETIONS,
    "/embedding": _EMBEDDINGS,
    "/infill": "use POST /v1/completions with the model's own markers for a gap",
    "/props": _MODELS,
    "/reranking": "use POST /rerank",
}
_TGI_AND_SGLANG = {
    "/generate": _COMPLETIONS,
    "/generate_stream": _COMPLETIONS,
    "/encode": _EMBEDDINGS,
    "/flush_cache": "use POST /reset_prefix_cache, which exists with --enable-admin-routes",
}
_PROVIDERS = {
    "/v1/engines": _COMPLETIONS,
    "/v1/complete": "use POST /v1/messages",
    "/v1/audio": _TEXT_ONLY,
    "/v1/images": _TEXT_ONLY,
    "/v1/videos": _TEXT_ONLY,
    "/v1/realtime": "use POST /v1/responses with stream",
    "/v1/files": _BATCHES,
    "/v1/batches": _BATCHES,
    "/v1/messages/batches": _BATCHES,
    "/v1/conversations": _STORED,
    "/v1/assistants": _STORED,
    "/v1/threads": _STORED,
    "/v2/embed": _EMBEDDINGS,
    "/v2/chat": _CHAT,
    "/cohere": _CHAT,
}
_VLLM = {
    "/v1/chat/completions/render": "use POST /tokenize or POST /apply-template with messages",
    "/v1/completions/render": "use POST /tokenize",
    "/v1/messages/render": "use POST /v1/messages/count_tokens",
    "/v1/responses/render": "use POST /v1/responses/input_tokens",
    "/v1/chat/completions/batch": "use POST /v1/chat/completions for each conversation",
    "/pooling": "use POST /v1/embeddings or POST /classify",
    "/generative_scoring": "use POST /v1/completions with logprob_token_ids and logprobs",
    "/server_info": "use GET /readyz and GET /version",
    "/collective_rpc": "workers execute no functions of clients",
    "/release_kv_cache_memory": "use POST /sleep, which exists with --enable-admin-routes",
    "/reset_mm_cache": _TEXT_ONLY,
    "/reset_encoder_cache": _TEXT_ONLY,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/start_weight_update": _WEIGHTS,
    "/update_weights": _WEIGHTS,
}
INSTEAD = _OLLAMA | _LLAMA_CPP | _TGI_AND_SGLANG | _PROVIDERS | _VLLM
"""A path holds for all paths below it, too."""


def instead_of(path: str) -> str | None:
    """Return what to do instead of sending a request to a path of another server, or None."""
    while path:
        if path in INSTEAD:
            return f"this server lacks it; {INSTEAD[path]}"
        path = path.rpartition("/")[0]
    return None
