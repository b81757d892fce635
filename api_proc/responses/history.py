"""The earlier turns of a conversation that `previous_response_id` continues."""

import asyncio
import re
from typing import Any

import msgspec

from api_proc.errors import ApiError, invalid, unavailable
from api_proc.generation.messages import MAX_MESSAGES
from api_proc.responses.items import InputItem
from api_proc.responses.objects import RESPONSE_PREFIX
from api_proc.responses.store import StoredResponse, unpack
from api_proc.state import ApiState

PEER_PATH = "/peer/responses/"
"""Where other API processes read a stored response."""
_SMALL_BYTES = 64 * 1024
_ID = re.compile(r"[\w-]+", re.ASCII)

decode_items = msgspec.json.Decoder(list[InputItem]).decode


class _Turn(msgspec.Struct):
    """The part of a stored response that a later request needs."""

    output: list[InputItem]


_decode_turn = msgspec.json.Decoder(_Turn).decode


async def find_response(state: ApiState, response_id: str) -> StoredResponse:
    """Return a response that this or another API process has stored, or raise a 404.

    The 404 names the possible reasons.
    """
    stored = state.stored_responses.get(response_id)
    if stored is None:
        stored = await _from_owner(state, response_id)
    if stored is None:
        if not state.stored_responses.is_recovered:
            raise unavailable("the journal has not been read yet", "recovering")
        raise response_not_found(state, response_id)
    return stored


async def _from_owner(state: ApiState, response_id: str) -> StoredResponse | None:
    """Return what the process that owns a response has stored; None: it is not another one."""
    if state.peers is None or not _ID.fullmatch(response_id):
        return None
    number = response_id.removeprefix(RESPONSE_PREFIX)
    max_bytes = state.config.api.max_stored_response_bytes
    packed = await state.peers.ask_owner(number, PEER_PATH + response_id, max_bytes)
    return None if packed is None else unpack(packed)


def response_not_found(state: ApiState, response_id: str, **fields: Any) -> ApiError:
    kept = "without --journal-dir, a restart of the server loses all stored responses"
    if state.config.api.journal_dir is not None:
        kept = "one that has not ended and lost its connection is read by sending its POST again"
    message = (
        f"the response {response_id[:200]!r} does not exist: it was not stored, was deleted, or "
        f"was dropped to make room (--max-stored-responses, --max-stored-response-bytes); {kept}"
    )
    return ApiError(404, message, **({"code": "response_not_found"} | fields))


def for_later(stored: StoredResponse) -> StoredResponse:
    """Return a response without the part that a later request does not need, such as logprobs."""
    if stored.num_bytes < _SMALL_BYTES:
        return stored
    turn = _decode_turn(stored.response)
    return msgspec.structs.replace(stored, response=msgspec.json.encode(turn))


async def earlier_turns(state: ApiState, response_id: str) -> list[StoredResponse]:
    """Return the turns that end with this response, the oldest first, within bounds."""
    turns: list[StoredResponse] = []
    num_bytes, max_bytes = 0, state.config.api.max_body_bytes
    found: str | None = response_id
    while found is not None:
        try:
            stored = await find_response(state, found)
        except ApiError as error:
            raise _as_previous(state, error, found) from None
        stored = for_later(stored)
        turns.append(stored)
        num_bytes += stored.num_bytes
        if num_bytes > max_bytes:
            message = f"the conversation has more than {max_bytes} bytes, as max_body_bytes allows"
            raise invalid("previous_response_id", message)
        if len(turns) > MAX_MESSAGES:
            message = f"the conversation has more than {MAX_MESSAGES} turns"
            raise invalid("previous_response_id", message)
        found = stored.previous_id
    return turns[::-1]


async def items_of(turns: list[StoredResponse]) -> list[InputItem]:
    """Return the items that these turns consist of: each input, then the output."""
    items: list[InputItem] = []
    for turn in turns:
        items += decode_items(turn.items) + _decode_turn(turn.response).output
        await asyncio.sleep(0)  # let other requests run between the turns
    return items


def _as_previous(state: ApiState, error: ApiError, response_id: str) -> ApiError:
    if error.status != 404:
        return error
    return response_not_found(
        state, response_id, param="previous_response_id", code="previous_response_not_found"
    )
