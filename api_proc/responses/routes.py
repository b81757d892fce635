"""The routes of responses that exist: read, list the input, cancel, delete."""

import re
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from api_proc.errors import ApiError, invalid, unsupported
from api_proc.http.connection import Connection
from api_proc.peers.forwarding import forward_to_owner
from api_proc.peers.sums import PeerRoute
from api_proc.responses.history import (
    PEER_PATH,
    decode_items,
    find_response,
    for_later,
    response_not_found,
)
from api_proc.responses.items import InputItem
from api_proc.responses.objects import RESPONSE_PREFIX, Deleted
from api_proc.responses.store import pack
from api_proc.state import ApiState

MAX_LISTED = 100
_LISTED = 20
"""Items in a list by default."""

_decode_any = msgspec.json.Decoder(dict[str, Any]).decode


class ItemList(msgspec.Struct, kw_only=True):
    """Response of /v1/responses/{response_id}/input_items."""

    object: str = "list"
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def show_response(state: ApiState, connection: Connection) -> None:
    """GET /v1/responses/{response_id}: a stored response, or one that is generated now."""
    if _query(connection).get("stream", "false") not in ("false", "0"):
        message = "is not supported: send the POST again with Last-Event-ID to read on"
        raise unsupported("stream", message)
    if await _is_forwarded(state, connection):
        return
    response_id = _id(connection)
    running = state.open_requests.response(response_id)
    if running is not None:
        await connection.send(200, running.snapshot())
        return
    await connection.send(200, (await find_response(state, response_id)).response)


async def delete_response(state: ApiState, connection: Connection) -> None:
    """DELETE /v1/responses/{response_id}."""
    if await _is_forwarded(state, connection):
        return
    response_id = _id(connection)
    if state.open_requests.response(response_id) is not None:
        message = f"the response {response_id!r} is in progress; cancel it first"
        raise ApiError(409, message, code="response_in_progress")
    await find_response(state, response_id)
    if not await state.stored_responses.delete(response_id):  # a predecessor still has it
        raise response_not_found(state, response_id)
    await connection.send_json(Deleted(id=response_id))


async def cancel_response(state: ApiState, connection: Connection) -> None:
    """POST /v1/responses/{response_id}/cancel: end a response that is generated now."""
    raw = await connection.read_body(state.config.api.max_body_bytes, is_control=True)
    if await _is_forwarded(state, connection, raw):
        return
    response_id = _id(connection)
    running = state.open_requests.response(response_id)
    if running is not None:
        await connection.send(200, await running.cancel())
        return
    stored = await find_response(state, response_id)
    status = _decode_any(stored.response)["status"]
    if status != "cancelled":
        message = f"the response {response_id!r} is {status}, so it cannot be cancelled"
        raise ApiError(400, message, code="response_not_in_progress")
    await connection.send(200, stored.response)


async def list_input_items(state: ApiState, connection: Connection) -> None:
    """GET /v1/responses/{response_id}/input_items: what the request of a response sent."""
    query = _query(connection)
    limit = query.get("limit", str(_LISTED))
    if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= MAX_LISTED:
        raise invalid("limit", f"must be an integer from 1 to {MAX_LISTED}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", "must be asc or desc")
    stored = await find_response(state, _id(connection))
    items = decode_items(stored.items)
    if order == "desc":
        items.reverse()
    if "after" in query:
        names = [item.id for item in items]
        if query["after"] not in names:
            raise invalid("after", "is not the id of an item")
        items = items[names.index(query["after"]) + 1 :]
    shown = items[: int(limit)]
    listed = ItemList(
        data=shown,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=len(shown) < len(items),
    )
    await connection.send_json(listed)


async def stored_response(state: ApiState, connection: Connection) -> None:
    """GET /peer/responses/{response_id}: for other API processes, which continue conversations."""
    stored = await find_response(state, _id(connection))
    await connection.send(200, pack(for_later(stored)), content_type=b"application/msgpack")


PEER_ROUTES: tuple[PeerRoute, ...] = (("GET", PEER_PATH + "{response_id}", stored_response),)
"""Routes that only other API processes can reach."""


async def _is_forwarded(state: ApiState, connection: Connection, body: bytes = b"") -> bool:
    """Let the API process that owns the response answer; False: it is this one."""
    number = _id(connection).removeprefix(RESPONSE_PREFIX)
    return await forward_to_owner(state, connection, number, body)


def _id(connection: Connection) -> str:
    return str(connection.scope["path_params"]["response_id"])


def _query(connection: Connection) -> dict[str, str]:
    """Return the parameters of the query; the last of several with one name counts."""
    text = connection.scope["query_string"].decode("latin-1")
    try:
        return dict(parse_qsl(text, max_num_fields=32))
    except ValueError as error:
        raise ApiError(400, f"the query cannot be read: {error}", code="invalid_query") from error
