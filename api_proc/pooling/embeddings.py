"""POST /v1/embeddings: one vector per text, pooled from the model's hidden states."""

from base64 import b64encode
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from api_proc.bodies import MAX_PROMPTS, PromptItems, PromptText
from api_proc.errors import invalid
from api_proc.generation.prompt_items import prompt_items
from api_proc.http.connection import Connection, encode
from api_proc.http.json_body import BodyDecoder
from api_proc.pooling.pooled import (
    AT_ONCE,
    EmbeddingUsage,
    PooledBody,
    PooledList,
    PooledPrompt,
    PooledRequests,
    decoded_in_slices,
    kept_length,
    pooled_list,
    require_vectors,
    usage_of,
)
from api_proc.state import ApiState
from api_proc.text.embedding_config import embedding_config
from api_proc.text.processor import too_long
from api_proc.text.tokenizer import EncodeOptions
from protocol.message import unpack_floats
from protocol.model_facts import ModelFacts
from protocol.sampling import MAX_EMBEDDING_SIZE, Pooling, PoolingType

MAX_RESPONSE_BYTES = 2**25
PromptName = Annotated[str, Meta(max_length=256)]
_BYTES_PER_NUMBER = {"float": 22, "base64": 6}
"""Approximate size of a number in the response, in bytes."""


class EmbeddingBody(PooledBody, kw_only=True):
    """Body of POST /v1/embeddings. None means the server's default."""

    input: PromptText | PromptItems
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_EMBEDDING_SIZE)] | None = None
    pooling: PoolingType | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    """vLLM's name for `normalize`."""
    add_special_tokens: bool | None = None
    prompt_name: PromptName | None = None
    """Name of one of the checkpoint's prompts, whose text is prepended to each input."""


class Embedding(msgspec.Struct, kw_only=True):
    """One vector; base64 encodes little-endian float32."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingResponse(PooledList[Embedding]):
    """Response of /v1/embeddings."""


_decode = BodyDecoder(EmbeddingBody)


async def create_embeddings(state: ApiState, connection: Connection) -> None:
    """Handle one request; its vectors are batched with all other requests."""
    async with decoded_in_slices(state, connection, _decode) as (body, facts, turn):
        adapter = state.require_model(body.model)
        pooling = _pooling(state, body, facts)
        inputs = _inputs(body)
        # Checked before any work: waiting requests reserve the memory for their answers.
        connection.lease.reserve(_response_bytes(body, len(inputs), pooling, facts))
        await turn.rest()
        prompts = await connection.while_connected(_tokenize(state, body, inputs, facts))
        requests = PooledRequests(
            state, connection, body, prompts, pooling=pooling, adapter=adapter
        )
        render = partial(_render, body.encoding_format or "float")
        vectors = await requests.compute(facts, turn, render, param="input")
    if vectors is not None:
        name = state.shown_model(body.model)
        await connection.send_pieces(_response(name, connection, usage_of(prompts), vectors))


def _response_bytes(
    body: EmbeddingBody, num_inputs: int, pooling: Pooling, facts: ModelFacts
) -> int:
    """Return the approximate size of the response; raise a 400 if it is too large."""
    encoding_format = body.encoding_format or "float"
    size = pooling.dimensions or facts.embedding_size
    max_inputs = MAX_RESPONSE_BYTES // _BYTES_PER_NUMBER[encoding_format] // size
    if num_inputs > max_inputs:
        message = (
            f"a response holds at most {max_inputs} vectors of {size} numbers as {encoding_format}"
        )
        raise invalid("input", message)
    return num_inputs * size * _BYTES_PER_NUMBER[encoding_format]


def _pooling(state: ApiState, body: EmbeddingBody, facts: ModelFacts) -> Pooling:
    require_vectors(facts)
    size = facts.embedding_size
    config = embedding_config(state.config.model)
    dimensions = None if body.dimensions == size else body.dimensions
    if dimensions is not None:
        if not config.can_shorten:
            message = f"the model's vectors have {size} numbers and cannot be shortened"
            raise invalid("dimensions", message)
        if dimensions > size:
            raise invalid("dimensions", f"must be at most {size}, the size of the model's vectors")
        if config.dimensions and dimensions not in config.dimensions:
            known = ", ".join(map(str, config.dimensions))
            raise invalid("dimensions", f"the model was trained with {known}")
    asked = body.use_activation if body.normalize is None else body.normalize
    normalize = config.modules.normalize if asked is None else asked
    return Pooling(body.pooling or facts.default_pooling, dimensions, normalize)


def _inputs(body: EmbeddingBody) -> list[Any]:
    """Return the inputs as texts or as lists of ids, in bounded number."""
    items = prompt_items(body.input, "input")
    if len(items) > MAX_PROMPTS:
        raise invalid("input", f"may hold at most {MAX_PROMPTS} inputs")
    return items


async def _tokenize(
    state: ApiState, body: EmbeddingBody, items: list[Any], facts: ModelFacts
) -> list[PooledPrompt]:
    """Return the ids of each input."""
    max_tokens = facts.max_model_len
    keep_last = kept_length(body.truncate_prompt_tokens, facts)
    prompts: list[list[int]]
    if isinstance(items[0], str):
        options = EncodeOptions(body.add_special_tokens is not False, max_tokens, keep_last, 0)
        texts = embedding_config(state.config.model).texts(items, body.prompt_name)
        prompts = await state.text.encode(texts, options, param="input")
    else:
        if body.prompt_name:
            raise invalid("prompt_name", "is for inputs that are texts")
        prompts = items if keep_last is None else [ids[-keep_last:] for ids in items]
    if not all(prompts):
        raise invalid("input", "an input has no tokens", "empty_prompt")
    longest = max(map(len, prompts))
    if longest > max_tokens:
        raise too_long(longest, max_tokens, "input", num_outputs=0)
    return [PooledPrompt(token_ids) for token_ids in prompts]


def _render(encoding_format: str, index: int, packed: bytes) -> bytes:
    if encoding_format == "base64":
        return encode(Embedding(index=index, embedding=b64encode(packed).decode()))
    return encode(Embedding(index=index, embedding=unpack_floats(packed).tolist()))


def _response(
    model: str, connection: Connection, usage: EmbeddingUsage, vectors: list[bytes]
) -> list[bytes]:
    """Return the response in pieces of several vectors each."""
    response = pooled_list(EmbeddingResponse, "embd", connection, model, [], usage=usage)
    before, name, after = encode(response).partition(b'"data":')
    groups = [
        b",".join(vectors[first : first + AT_ONCE]) for first in range(0, len(vectors), AT_ONCE)
    ]
    others = (b"," + group for group in groups[1:])
    return [before + name + b"[" + groups[0], *others, after.removeprefix(b"[")]
