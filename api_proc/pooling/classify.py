"""POST /classify: the labels of texts, with their probabilities."""

from functools import partial

import msgspec

from api_proc.errors import ApiError
from api_proc.http.connection import Connection
from api_proc.http.json_body import BodyDecoder
from api_proc.pooling.pooled import (
    PooledBody,
    PooledList,
    PooledPrompt,
    PooledRequests,
    decoded_in_slices,
    kept_length,
    pooled_list,
    usage_of,
)
from api_proc.pooling.scores import Texts
from api_proc.state import ApiState
from api_proc.text.label_config import label_config
from api_proc.text.tokenizer import EncodeOptions
from protocol.message import unpack_floats
from protocol.model_facts import ModelFacts
from protocol.sampling import Pooling

_BYTES_PER_LABEL = 32


class ClassifyBody(PooledBody, kw_only=True):
    """Body of POST /classify. None means the server's default."""

    input: Texts
    use_activation: bool | None = None
    """False: return the raw scores of the classification head."""
    add_special_tokens: bool | None = None


class Classification(msgspec.Struct, kw_only=True):
    """The label of a text, and the probability of each label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(PooledList[Classification]):
    """Response of /classify."""


_decode = BodyDecoder(ClassifyBody)


async def classify(state: ApiState, connection: Connection) -> None:
    """Handle one request; its texts are batched with all other requests."""
    async with decoded_in_slices(state, connection, _decode) as (body, facts, turn):
        adapter = state.require_model(body.model)
        if facts.num_labels == 0:
            raise ApiError(400, "the model has no classification head", code="unsupported_model")
        texts = [body.input] if isinstance(body.input, str) else body.input
        connection.lease.reserve(len(texts) * facts.num_labels * _BYTES_PER_LABEL)
        await turn.rest()
        prompts = await connection.while_connected(_tokenize(state, body, texts, facts))
        pooling = Pooling(facts.default_pooling, normalize=False)
        requests = PooledRequests(
            state, connection, body, prompts, pooling=pooling, adapter=adapter
        )
        take = partial(_result, state, body)
        results = await requests.compute(facts, turn, take, param="input")
    if results is not None:
        name = state.shown_model(body.model)
        response = pooled_list(
            ClassificationResponse, "classify", connection, name, results, usage=usage_of(prompts)
        )
        await connection.send_json(response)


def _result(state: ApiState, body: ClassifyBody, index: int, packed: bytes) -> Classification:
    labels, scores = label_config(state.config.model), unpack_floats(packed).tolist()
    best = labels.name(scores.index(max(scores)))
    probs = scores if body.use_activation is False else labels.activate(scores)
    return Classification(index=index, label=best, probs=probs, num_classes=len(probs))


async def _tokenize(
    state: ApiState, body: ClassifyBody, texts: list[str], facts: ModelFacts
) -> list[PooledPrompt]:
    keep = kept_length(body.truncate_prompt_tokens, facts)
    options = EncodeOptions(body.add_special_tokens is not False, facts.max_model_len, keep, 0)
    lists = await state.text.encode(texts, options, param="input")
    return [PooledPrompt(ids) for ids in lists]
