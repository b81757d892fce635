"""GET routes: models, health, metrics and version."""

import time

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from api_proc.http.connection import Connection
from api_proc.peers.sums import sum_of_gauges
from api_proc.state import ApiState
from protocol.process.version import version


class ModelCard(msgspec.Struct, kw_only=True):
    """One name of the model."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int | None
    """None while the engine starts."""
    root: str
    """Path of the loaded model, or the directory of an adapter."""
    parent: str | None
    """The model to which an adapter belongs; None for the model itself."""


class ModelList(msgspec.Struct, kw_only=True):
    """Response of /v1/models."""

    object: str
    data: list[ModelCard]


class Alive(msgspec.Struct):
    """Response of /livez."""

    alive: bool


class Version(msgspec.Struct):
    """Response of /version."""

    version: str


class Readiness(msgspec.Struct, kw_only=True):
    """Response of /readyz and /health."""

    ready: bool
    state: str
    draining: bool
    status_age_s: float | None
    """Seconds since the core's last report."""
    journal: str
    exact_resume: bool | None
    exact_resume_reason: str | None
    decoder: str | None
    """Implementation of the layers: native or modules."""
    speculation: str | None
    """The method of speculative decoding, if any."""
    quantization: str | None
    """Quantization of the weights at loading: w8a16, w4a16 or w8a8."""
    kv_cache_dtype: str | None
    """Data type of quantized keys and values in the KV cache: int8 or fp8."""
    api_servers: int
    """Configured number of API processes."""
    api_servers_ready: int
    """API processes that answer in time."""
    replicas: list[str]
    """The state of each replica of the engine; `other_model`: it gets no requests."""
    other_models: list[str]
    """A line for each replica with another model, which names it and the difference."""
    fingerprints: list[str]
    """Fingerprint of each replica; empty: not known. Requests that have begun continue only at a
    replica with the same fingerprint."""


async def list_models(state: ApiState, connection: Connection) -> None:
    adapters = [one.adapter.name for one in state.adapters.all()]
    cards = [_model_card(state, name) for name in (*state.model_names, *adapters)]
    await connection.send_json({"object": "list", "data": cards})


async def show_model(state: ApiState, connection: Connection) -> None:
    """GET /v1/models/{name}; raises a 404 for any other model."""
    name = connection.scope["path_params"]["name"]
    state.require_model(name)
    await connection.send_json(_model_card(state, name))


async def livez(state: ApiState, connection: Connection) -> None:
    """GET /livez: the event loop of this process runs."""
    await connection.send(200, b'{"alive":true}')


async def readyz(state: ApiState, connection: Connection) -> None:
    """GET /readyz: every API process that answers accepts new requests.

    A dead or hanging process accepts no connections from the common socket.
    """
    body = await _readiness(state, connection)
    await _send_readiness(connection, body, is_good=body.ready)


async def health(state: ApiState, connection: Connection) -> None:
    """GET /health: accepted requests make progress."""
    body = await _readiness(state, connection)
    await _send_readiness(connection, body, is_good=state.is_serving())


async def metrics(state: ApiState, connection: Connection) -> None:
    body = state.exposition(await sum_of_gauges(state))
    await connection.send(200, body, content_type=CONTENT_TYPE_LATEST.encode())


async def show_version(state: ApiState, connection: Connection) -> None:
    await connection.send_json(Version(version()))


def _model_card(state: ApiState, name: str) -> dict[str, object]:
    facts = state.client.facts
    named = None if state.is_base_model(name) else state.adapters.find(name)
    card = {
        "object": "model",
        "owned_by": "troika",
        "max_model_len": None if facts is None else facts.max_model_len,
    }
    if named is not None:
        parent = named.parent or state.model_name
        own = {"root": named.adapter.path, "parent": parent, "created": named.created}
        return {"id": name, **own, **card}
    shown = name if name in state.model_names else state.model_name
    root = state.config.model.shown_model
    return {"id": shown, "root": root, "parent": None, "created": state.created, **card}


async def _readiness(state: ApiState, connection: Connection) -> Readiness:
    others: dict[int, bool] = {}
    if state.peers is not None and not connection.is_forwarded:
        for answer in await state.peers.ask_all("GET", "/readyz"):
            if answer.index != state.ids.index:  # its predecessor accepts no connections
                others.setdefault(answer.index, answer.status == 200)
    has_status = state.client.status is not None
    age_s = time.monotonic() - state.client.last_status_time
    facts = state.client.facts
    journal = "off"
    if state.sessions is not None:  # "failed": requests are kept in memory only
        journal = "failed" if state.sessions.journaling.is_failed else "writing"
    return Readiness(
        ready=state.is_ready() and all(others.values()),
        state=state.shown_state(),
        draining=state.is_draining,
        status_age_s=round(age_s, 3) if has_status else None,
        journal=journal,
        exact_resume=None if facts is None else facts.exact_resume,
        exact_resume_reason=None if facts is None else facts.exact_resume_reason,
        decoder=(facts and facts.decoder) or None,
        speculation=(facts and facts.speculation) or None,
        quantization=(facts and facts.quantization) or None,
        kv_cache_dtype=(facts and facts.kv_cache_dtype) or None,
        api_servers=state.ids.count,
        api_servers_ready=state.is_ready() + sum(others.values()),
        replicas=state.replica_states(),
        other_models=state.other_models(),
        fingerprints=[client.engine.fingerprint for client in state.client.clients],
    )


async def _send_readiness(connection: Connection, body: Readiness, *, is_good: bool) -> None:
    headers = [] if is_good else [(b"retry-after", b"1")]
    await connection.send_json(body, status=200 if is_good else 503, headers=headers)
