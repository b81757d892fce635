"""Fingerprints of requests: equal for requests that differ at most in their seeds."""

import hashlib

import msgspec

from core_proc.request import Request
from protocol.sampling import SamplingParams


def fingerprint(prompt: bytes | memoryview, params: SamplingParams, adapter_id: int = 0) -> int:
    """Hash a prompt of packed ids, its parameters except the seed, and its adapter to 64 bits."""
    digest = hashlib.sha256(prompt)
    if adapter_id:
        digest.update(adapter_id.to_bytes(8, "little"))
    digest.update(msgspec.msgpack.encode(msgspec.structs.replace(params, seed=0)))
    return int.from_bytes(digest.digest()[:8], "little")


def fingerprint_of(request: Request) -> int:
    """Return the fingerprint of a request, which is computed once."""
    if request.fingerprint is None:
        with memoryview(request.token_ids) as ids, ids[: request.num_prompt_tokens] as prompt:
            params, adapter_id = request.sampling_params, request.adapter_id
            request.fingerprint = fingerprint(prompt, params, adapter_id)
    return request.fingerprint
