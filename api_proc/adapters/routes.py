"""Admin routes that load and unload LoRA adapters, with vLLM's bodies."""

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from api_proc.adapters.registry import MAX_NAMES, NamesLocked, NameTaken
from api_proc.errors import ApiError, from_request_error, invalid, unavailable
from api_proc.http.connection import Connection
from api_proc.http.json_body import Body, BodyDecoder, Turn
from api_proc.state import ApiState
from protocol.adapters import Adapter, AdapterError, AdapterName, AdapterPath
from protocol.client.errors import RequestFailed
from protocol.config.lora_modules import LoraModule

_TEXT = b"text/plain; charset=utf-8"


class LoadAdapterBody(msgspec.Struct, kw_only=True):
    """Body of /v1/load_lora_adapter."""

    lora_name: AdapterName
    lora_path: AdapterPath
    """A directory in PEFT's format."""
    load_inplace: bool | None = False
    """Replace an adapter of this name; requests that are open keep the old one."""
    base_model_name: Annotated[str, Meta(max_length=256)] | None = None


class UnloadAdapterBody(msgspec.Struct, kw_only=True):
    """Body of /v1/unload_lora_adapter."""

    lora_name: AdapterName
    lora_int_id: int | None = None
    """Accepted because vLLM has it, and ignored."""


_decode_load = BodyDecoder(LoadAdapterBody)
_decode_unload = BodyDecoder(UnloadAdapterBody)


async def load_adapter(state: ApiState, connection: Connection) -> None:
    """POST /v1/load_lora_adapter: answered once the workers have loaded or checked it."""
    body = await _decoded(state, connection, _decode_load)
    name = body.lora_name
    if state.is_base_model(name):
        raise invalid("lora_name", f"{name!r} is a name of the model")
    if state.adapters.find(name) is not None and not body.load_inplace:
        raise _taken(name)
    if len(state.adapters.all()) >= MAX_NAMES:
        raise invalid("lora_name", f"there are {MAX_NAMES} adapters already")
    module = LoraModule(name, body.lora_path, body.base_model_name)
    try:
        named = await asyncio.to_thread(state.adapters.read, module)
    except AdapterError as error:
        raise invalid("lora_path", str(error), "invalid_adapter") from error
    await _load(state, named.adapter)
    try:
        await asyncio.to_thread(state.adapters.add, named, replaces=bool(body.load_inplace))
    except NameTaken as error:
        raise _taken(name) from error
    except NamesLocked as error:
        raise unavailable(str(error), "names_locked") from error
    text = f"Success: LoRA adapter '{name}' added successfully."
    await connection.send(200, text.encode(), content_type=_TEXT)


async def unload_adapter(state: ApiState, connection: Connection) -> None:
    """POST /v1/unload_lora_adapter: its name is gone at once; open requests are finished."""
    body = await _decoded(state, connection, _decode_unload)
    try:
        removed = await asyncio.to_thread(state.adapters.remove, body.lora_name)
    except NamesLocked as error:
        raise unavailable(str(error), "names_locked") from error
    if removed is None:
        message = f"the LoRA adapter {body.lora_name!r} does not exist"
        raise ApiError(404, message, param="lora_name", code="not_found")
    digests = {named.adapter.digest for named in state.adapters.all()}
    if removed.adapter.digest not in digests:  # another name may stand for the same files
        await _unload(state, removed.adapter)
    text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
    await connection.send(200, text.encode(), content_type=_TEXT)


async def _decoded(state: ApiState, connection: Connection, decode: BodyDecoder[Body]) -> Body:
    """Read and decode a body, if adapters are enabled."""
    raw = await connection.read_body(state.config.api.max_body_bytes, is_control=True)
    state.require_facts()
    if not state.config.lora.enable_lora:
        raise ApiError(400, "the server was started without --enable-lora", code="lora_disabled")
    with Turn(state.large_requests) as turn:
        body, _ = await decode.in_slices(raw, turn)
    return body


def _taken(name: str) -> ApiError:
    message = f"the LoRA adapter {name!r} is loaded already; load_inplace replaces it"
    return invalid("lora_name", message, "already_loaded")


async def _load(state: ApiState, adapter: Adapter) -> None:
    """Have the workers load or check an adapter; raises what is wrong with it."""
    try:
        error = await state.client.load_adapter(adapter)
    except TimeoutError as silence:
        raise unavailable("the engine does not respond", "engine_silent") from silence
    except RequestFailed as failure:
        raise from_request_error(failure.error, "") from failure
    if error:
        raise invalid("lora_path", f"{adapter.path}: {error}", "invalid_adapter")


async def _unload(state: ApiState, adapter: Adapter) -> None:
    """Have the workers drop an adapter; one that cannot be asked drops it when it needs room."""
    try:
        await state.client.unload_adapter(adapter)
    except (TimeoutError, RequestFailed):
        return
