"""What happens to fields of a request that the server does not know."""

import logging
import re
from collections.abc import Mapping

import msgspec

from api_proc.errors import unsupported

MAX_LOGGED = 256
"""Names that are logged in the lifetime of a process, each once."""
_MAX_SHOWN = 8
_HEADER = b"x-unknown-fields"
_SHOWN = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)
_INDEX = re.compile(r"\[\d+\]")

FOREIGN = {
    "ebnf": "structured_outputs",
    "format": "response_format",
    "grammar": "structured_outputs",
    "json_schema": "response_format",
    "regex": "structured_outputs",
    "structural_tag": "structured_outputs",
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "options": "fields of the request itself",
    "parameters": "fields of the request itself",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "stop_regex": "stop",
    "stop_token_text": "stop",
    "do_sample": "temperature",
    "typical_p": "",
    "mirostat": "",
    "dry_multiplier": "",
    "xtc_probability": "",
    "dynatemp_range": "",
    "top_a": "",
    "tfs_z": "",
    "num_beams": "use_beam_search",
    "lora_request": "model",
    "lora": "model",
    "lora_path": "model",
    "adapter_id": "model",
    "images": "",
    "image_data": "",
    "system": "messages",
    "echo": "",
    "truncation_side": "",
    "kv_transfer_params": "",
    "ec_transfer_params": "",
    "vllm_xargs": "",
    "watermarking": "",
}
"""Other servers' names for what constrains or stops the output, with this server's name for it."""
FOREIGN_POOLED = FOREIGN | {
    "embed_dtype": "encoding_format",
    "endianness": "encoding_format",
    "max_tokens_per_doc": "truncate_prompt_tokens",
    "max_tokens_per_query": "truncate_prompt_tokens",
    "messages": "",
    "padding": "",
}
"""The same for the routes of embeddings, scores and labels."""
_NEUTRAL = {
    "echo": (b"false",),
    "ec_transfer_params": (b"{}",),
    "embed_dtype": (b'"float32"',),
    "endianness": (b'"native"', b'"little"'),
    "kv_transfer_params": (b"{}",),
    "max_tokens_per_doc": (b"0",),
    "max_tokens_per_query": (b"0",),
    "padding": (b'"do_not_pad"',),
    "truncation_side": (b'"left"',),
    "vllm_xargs": (b"{}",),
    "watermarking": (b"false",),
}
"""Values that ask for what this server does anyway."""
WITHOUT_EFFECT = frozenset(
    {
        *("metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    }
)
"""OpenAI's names for what concerns its own service only."""

log = logging.getLogger("troika.api")


class UnknownFields:
    """Ignores unknown fields, warns of them, or refuses them."""

    def __init__(self, mode: str) -> None:
        """`mode` is ignore, warn or refuse, as the setting `unknown_fields`."""
        self._mode = mode
        self._logged: set[str] = set()

    def check(
        self, raw: bytes, names: list[str], foreign: Mapping[str, str] = FOREIGN
    ) -> list[tuple[bytes, bytes]]:
        """Return the headers that warn of these fields of a body, or raise a 400 for one of them.

        Fields of objects in the body have paths, such as `tools[0].function.x`.

        A field in `foreign`, which constrains the output, is always refused: the client would rely
        on it.
        """
        names = [name for name in names if name not in WITHOUT_EFFECT]
        if not names:
            return []
        refuse_foreign(raw, names, foreign)
        if self._mode == "refuse":
            name = names[0][:64]
            raise unsupported(name, "is not a field of this route")
        if self._mode == "ignore":
            return []
        shown = [name for name in names if _SHOWN.fullmatch(name)][:_MAX_SHOWN]
        for name in dict.fromkeys(_INDEX.sub("[]", name) for name in shown):
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                log.warning("requests have the unknown field %s, which is ignored", name)
        return [(_HEADER, ", ".join(shown).encode())] if shown else []


def refuse_foreign(raw: bytes, names: list[str], foreign: Mapping[str, str]) -> None:
    """Raise a 400 for a name in `foreign`, which has the route's own name for each or ""."""
    found = [name for name in names if name in foreign]
    if not found:
        return
    values = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    for name in found:
        if bytes(values[name]).strip() not in (b"null", *_NEUTRAL.get(name, ())):
            hint = f"; use {foreign[name]}" if foreign[name] else ""
            raise unsupported(name, f"is not supported{hint}")
