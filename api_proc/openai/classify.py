"""POST /classify: the labels of texts, with their probabilities."""

import time
from functools import partial

import msgspec

from api_proc.bodies import PromptText, TruncateTokens
from api_proc.errors import ApiError, from_request_error
from api_proc.http.connection import Connection
from api_proc.http.json_body import BodyDecoder, Turn
from api_proc.openai.embeddings import EmbeddingUsage
from api_proc.openai.objects import encode
from api_proc.openai.pooled import PooledPrompt, PooledRequests, Submission, kept_length
from api_proc.openai.scores import Texts
from api_proc.state import ApiState
from api_proc.text.label_config import label_config
from api_proc.text.tokenizer import EncodeOptions
from protocol.api_core import Tenant
from protocol.client.errors import RequestFailed
from protocol.core_worker import ModelFacts
from protocol.message import unpack_floats
from protocol.sampling import CacheSalt, Pooling, Priority

_BYTES_PER_LABEL = 32


class ClassifyBody(msgspec.Struct, kw_only=True):
    """Body of POST /classify. None: the server's default."""

    input: Texts
    model: str | None = None
    user: Tenant | None = None
    use_activation: bool | None = None
    """False: the scores of the classification head as they are."""
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: TruncateTokens | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class Classification(msgspec.Struct, kw_only=True):
    """The label of a text, and the probability of each label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct, kw_only=True):
    """Response of /classify."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


_decode = BodyDecoder(ClassifyBody)


async def classify(state: ApiState, connection: Connection) -> None:
    """Handle one request; its texts are computed together with all other requests."""
    raw = await connection.read_body(state.config.api.max_body_bytes)
    facts = await state.accepting()
    with Turn(state.large_requests) as turn:
        body, unknown = await _decode.in_turn(raw, turn)
        connection.reserve_values(turn.num_values)
        connection.headers += state.unknown_fields.check(raw, unknown)
        raw = b""
        adapter = state.require_model(body.model)
        if facts.num_labels == 0:
            raise ApiError(400, "the model has no classification head", code="unsupported_model")
        texts: list[PromptText] = [body.input] if isinstance(body.input, str) else body.input
        connection.reserve(len(texts) * facts.num_labels * _BYTES_PER_LABEL)
        await turn.rest()
        prompts = await connection.while_connected(_tokenize(state, body, texts, facts))
        pooling = Pooling(facts.default_pooling, normalize=False)
        salt, tenant = body.cache_salt or "", body.user or ""
        common = Submission(pooling, body.priority or 0, salt, tenant, adapter)
        with PooledRequests(state, connection, "/classify", prompts) as requests:
            try:
                await requests.submit(common, facts, turn)
                turn.end()
                results = await requests.read(partial(_result, state, body))
            except RequestFailed as failure:
                raise from_request_error(failure.error, "input") from failure
    if results is not None:
        num_tokens = requests.num_tokens
        response = ClassificationList(
            id="classify-" + connection.request_id,
            created=int(time.time()),
            model=state.shown_model(body.model),
            data=results,
            usage=EmbeddingUsage(num_tokens, num_tokens),
        )
        await connection.send(200, encode(response))


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
