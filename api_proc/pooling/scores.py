"""POST /score and /rerank: the similarity or relevance of texts.

A classification head scores each pair of texts; for an embedding model, the score is the cosine of
their vectors.
"""

import asyncio
import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from api_proc.bodies import MAX_PROMPTS, PromptText
from api_proc.errors import ApiError, invalid, unsupported
from api_proc.generation.messages import check_template_kwargs
from api_proc.http.connection import Connection
from api_proc.http.json_body import BodyDecoder, Turn
from api_proc.pooling.pooled import (
    EmbeddingUsage,
    PooledBody,
    PooledList,
    PooledPrompt,
    PooledRequests,
    decoded_in_slices,
    kept_length,
    pooled_list,
    usage_of,
)
from api_proc.state import ApiState
from api_proc.text.embedding_config import embedding_config
from api_proc.text.label_config import label_config
from api_proc.text.tokenizer import EncodeOptions
from protocol.message import unpack_floats
from protocol.model_facts import ModelFacts
from protocol.sampling import Pooling

_BYTES_PER_SCORE = 96
_FORMS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""The names of the two fields that hold the texts."""

Texts = PromptText | Annotated[list[PromptText], Meta(min_length=1, max_length=MAX_PROMPTS)]


class ScoringBody(PooledBody, kw_only=True):
    """Fields that the bodies of both routes have. None means the server's default."""

    use_activation: bool | None = None
    """False: return the raw scores of the classification head."""
    instruction: str | None = None
    """vLLM's short form of `chat_template_kwargs`: a variable of the chat template."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template of the settings, with which pairs are rendered."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        given = {} if self.instruction is None else {"instruction": self.instruction}
        return given | (self.chat_template_kwargs or {})


class ScoreBody(ScoringBody, kw_only=True):
    """Body of POST /score: one or more texts, and as many others, or a single one."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class Document(msgspec.Struct):
    text: PromptText


class RerankBody(ScoringBody, kw_only=True):
    """Body of POST /rerank, in the format of Jina and Cohere."""

    query: PromptText
    documents: Annotated[list[PromptText | Document], Meta(min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """Maximum number of results, the best first; 0: all."""
    return_documents: bool | None = None
    """False: omit the documents' texts from the results."""


class Score(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(PooledList[Score]):
    """Response of /score."""


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One document, identified by its position in the request."""

    index: int = -1
    document: Document | None = None
    relevance_score: float = math.nan


class Reranking(msgspec.Struct, kw_only=True):
    """Response of /rerank: the most relevant document comes first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RerankResult]


class _Pairs(msgspec.Struct, frozen=True):
    """The texts of a request, its options, and the fields that held the texts."""

    body: ScoringBody
    first: list[str]
    """Either as many texts as in `second`, or one."""
    second: list[str]
    fields: tuple[str, str]

    @property
    def longest_field(self) -> str:
        """The field with the longest text, which errors name if a pair of texts does not fit."""
        longest = [max(map(len, texts)) for texts in (self.first, self.second)]
        return self.fields[longest[1] >= longest[0]]


class _Scored(msgspec.Struct, frozen=True):
    scores: list[float]
    usage: EmbeddingUsage


_decode_score = BodyDecoder(ScoreBody)
_decode_rerank = BodyDecoder(RerankBody)


async def create_scores(state: ApiState, connection: Connection) -> None:
    """POST /score and /v1/score."""
    async with decoded_in_slices(state, connection, _decode_score) as (body, facts, turn):
        scored = await _score(state, connection, _pairs(body), facts, turn)
    if scored is None:
        return
    scores = [Score(index=i, score=score) for i, score in enumerate(scored.scores)]
    name = state.shown_model(body.model)
    response = pooled_list(ScoreResponse, "score", connection, name, scores, usage=scored.usage)
    await connection.send_json(response)


async def rerank(state: ApiState, connection: Connection) -> None:
    """POST /rerank, /v1/rerank and /v2/rerank."""
    async with decoded_in_slices(state, connection, _decode_rerank) as (body, facts, turn):
        documents = [one if isinstance(one, str) else one.text for one in body.documents]
        pairs = _Pairs(body, [body.query], documents, ("query", "documents"))
        scored = await _score(state, connection, pairs, facts, turn)
    if scored is None:
        return
    results = [
        RerankResult(
            index=index,
            document=None if body.return_documents is False else Document(documents[index]),
            relevance_score=score,
        )
        for index, score in enumerate(scored.scores)
    ]
    results.sort(key=lambda result: (-result.relevance_score, result.index))
    response = Reranking(
        id="rerank-" + connection.request_id,
        model=state.shown_model(body.model),
        usage=scored.usage,
        results=results[: body.top_n or len(results)],
    )
    await connection.send_json(response)


def _pairs(body: ScoreBody) -> _Pairs:
    given = [name for names in _FORMS for name in names if getattr(body, name) is not None]
    for first, second in _FORMS:
        if set(given) == {first, second}:
            one, two = (_listed(getattr(body, name)) for name in (first, second))
            if len(one) not in (1, len(two)):
                message = f"has {len(one)} texts, and must have one or the {len(two)} of {second}"
                raise invalid(first, message)
            return _Pairs(body, one, two, (first, second))
    known = ", or ".join(" and ".join(names) for names in _FORMS)
    missing = "text_2" if "text_1" in given else "text_1"
    raise invalid(missing, f"the texts must be in {known}")


def _listed(texts: Any) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


async def _score(
    state: ApiState, connection: Connection, pairs: _Pairs, facts: ModelFacts, turn: Turn
) -> _Scored | None:
    """Return the score of each pair; None: the client has disconnected."""
    body = pairs.body
    adapter = state.require_model(body.model)
    _check(facts)
    _check_variables(state, body, facts)
    num_texts = len(pairs.second) if facts.num_labels else len(pairs.first) + len(pairs.second)
    connection.lease.reserve(num_texts * (_BYTES_PER_SCORE + facts.embedding_size * 4))
    await turn.rest()
    work = _tokenize(state, pairs, facts)
    prompts = await connection.while_connected(work)
    pooling = Pooling(facts.default_pooling, normalize=facts.num_labels == 0)
    requests = PooledRequests(state, connection, body, prompts, pooling=pooling, adapter=adapter)
    vectors = await requests.compute(
        facts, turn, lambda _, packed: packed, param=pairs.longest_field
    )
    if vectors is None:
        return None
    usage = usage_of(prompts)
    if facts.num_labels == 0:
        return _Scored(await _cosines(vectors, len(pairs.first)), usage)
    scores = [unpack_floats(packed).tolist() for packed in vectors]
    if body.use_activation is not False:
        labels = label_config(state.config.model)
        scores = [labels.activate(one) for one in scores]
    return _Scored([score for [score] in scores], usage)


def _check(facts: ModelFacts) -> None:
    if facts.embedding_size == 0:
        raise ApiError(400, "the model returns no scores", code="unsupported_model")
    if facts.num_labels > 1:
        message = f"the model has {facts.num_labels} labels, and a score needs one: use /classify"
        raise ApiError(400, message, code="unsupported_model")


def _check_variables(state: ApiState, body: ScoringBody, facts: ModelFacts) -> None:
    """Reject variables of the chat template if no template renders the pairs."""
    check_template_kwargs(body.chat_template_kwargs)
    if facts.num_labels and state.config.model.chat_template is not None:
        return
    for name in ("instruction", "chat_template_kwargs"):
        if getattr(body, name):
            raise unsupported(name, "is not supported: --chat-template names no template of pairs")


async def _cosines(vectors: list[bytes], num_first: int) -> list[float]:
    """Return the cosine of each pair of unit vectors; other requests get a turn after each."""
    first, second = vectors[:num_first], vectors[num_first:]
    first = first * len(second) if num_first == 1 else first
    cosines = []
    for pair in zip(first, second, strict=True):
        cosines.append(math.fsum(map(float.__mul__, *map(unpack_floats, pair))))
        await asyncio.sleep(0)
    return cosines


async def _tokenize(state: ApiState, pairs: _Pairs, facts: ModelFacts) -> list[PooledPrompt]:
    """Return a prompt for each pair; for an embedding model, one for each text."""
    keep = kept_length(pairs.body.truncate_prompt_tokens, facts)
    options = EncodeOptions(True, facts.max_model_len, keep, 0)
    if facts.num_labels == 0:
        made = embedding_config(state.config.model)
        prompts = []
        for param, texts in zip(pairs.fields, (pairs.first, pairs.second), strict=True):
            prompts += await state.text.encode(made.texts(texts, ""), options, param=param)
        return [PooledPrompt(ids) for ids in prompts]
    param = pairs.longest_field
    first = pairs.first * len(pairs.second) if len(pairs.first) == 1 else pairs.first
    both = list(zip(first, pairs.second, strict=True))
    if state.config.model.chat_template is not None:
        extra = pairs.body.template_variables
        return [PooledPrompt(await _templated(state, pair, options, extra, param)) for pair in both]
    if not label_config(state.config.model).has_separator:
        texts = [one + two for one, two in both]
        return [PooledPrompt(ids) for ids in await state.text.encode(texts, options, param=param)]
    found = await state.text.encode_pairs(both, options, param=param)
    return [PooledPrompt(*pair) for pair in found]


async def _templated(
    state: ApiState,
    pair: tuple[str, str],
    options: EncodeOptions,
    extra: dict[str, Any],
    param: str,
) -> list[int]:
    """Return the ids of a pair, rendered with the configured chat template.

    `extra` are variables of the template; `param` is the field to name if there are too many ids.
    """
    query, document = pair
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return await state.text.encode_chat(
        messages, options, add_generation_prompt=False, extra=extra, param=param
    )
