"""What a worker announces about its loaded model and its memory."""

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta, field

from protocol.message import Record, Text
from protocol.sampling import MAX_EMBEDDING_SIZE, PoolingType, SamplingParams

_FINGERPRINT_BYTES = 8
UNLIMITED_BLOCKS = 2**30
"""The number of blocks that a stage announces if it has no layers that use such blocks. They take
no memory in that stage, and the other stages decide how many there are."""


class KVGroup(Record):
    """Layers that share a block table: they have the same attention window, or recurrent states."""

    window: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    """Positions that a token attends to, itself included; None: all before it."""
    max_blocks: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    """Maximum number of blocks that one request holds, whatever its length; None: no bound."""
    is_state: bool = False
    """The table holds state blocks, and the other fields are None. Only the last group may be one,
    and it may be the only group."""


STAGE_SEPARATOR = ", "
"""Separates the values of a field that differs between stages."""


class ModelFacts(Record):
    """What only a worker knows: the loaded model and its memory."""

    model: Text
    vocab_size: Annotated[int, Meta(ge=1, lt=2**31)]
    max_model_len: Annotated[int, Meta(ge=2, lt=2**31)]
    """Tokens, prompt and outputs together."""
    block_size: Annotated[int, Meta(ge=1, le=1024)]
    num_gpu_blocks: Annotated[int, Meta(ge=2, lt=2**31)]
    """Blocks in the pool, NULL_BLOCK included."""
    eos_token_ids: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=64)]
    """An output that ends with the first of them has no stop token id."""
    dtype: Text = ""
    device: Text = ""
    kv_groups: Annotated[list[KVGroup], Meta(min_length=1, max_length=64)] = field(
        default_factory=lambda: [KVGroup()]
    )
    """A request has one block table for each. All take their blocks from one pool, except that a
    state group has the pool of state blocks."""
    num_host_blocks: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Blocks in host memory, numbered from 0, for the KV of swapped requests."""
    exact_resume: bool = False
    """Computing a request again, in any batch and any chunks, gives the same logits bit for bit."""
    exact_resume_reason: Text = ""
    embedding_size: Annotated[int, Meta(ge=0, le=MAX_EMBEDDING_SIZE)] = 0
    """Numbers in the vector of a prompt; 0: the worker returns none."""
    decoder: Text = ""
    """What computes the layers: "native", "triton" or "modules". Their results differ in bits. If
    stages differ, a list such as "native, modules"."""
    speculation: Text = ""
    """What makes drafts, in words; empty: nothing does."""
    quantization: Text = ""
    """How weights were rounded, "w8a16", "w4a16" or "w8a8"; empty: not at all."""
    kv_cache_dtype: Text = ""
    """Codes of keys and values in the cache, "int8" or "fp8"; empty: of type `dtype`."""
    num_state_blocks: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Blocks in the pool of the state group, NULL_BLOCK included; 0: there is no state group. Each
    running request needs one."""
    generates: bool = True
    """Whether the model has an output layer; else every request must have `pooling`."""
    computes_whole_prompts: bool = False
    """Whether its attention is not causal: each prompt is then computed in one step, from its first
    token on."""
    num_labels: Annotated[int, Meta(ge=0, le=MAX_EMBEDDING_SIZE)] = 0
    """Number of labels of a classification head, for each of which a vector has one number; 0: the
    model has no such head."""
    default_pooling: PoolingType = PoolingType.LAST
    """Pooling of requests that choose none; a classification head allows no other."""
    num_host_state_blocks: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Blocks in host memory, numbered from 0, for the states of swapped requests."""
    state_swap_blocks: Annotated[float, Meta(ge=0.0)] = 0.0
    """Cost of copying a state to the host and back, measured in copies of KV blocks. Without KV
    blocks it is 1, and `swap_cost_tokens` is the cost of a state. In a stage that has only one of
    the two, it is 0."""
    checkpoint: Text = ""
    """Digest of the contents of the model's files, wherever they are stored; empty: there are
    none."""
    kv_layout: Text = ""
    """Identifies what the bytes of a KV block mean: workers with equal layouts can use each other's
    blocks. If stages differ, the layouts of all stages. Empty: blocks are not stored elsewhere."""
    build: Text = ""
    """Everything else that results depend on: versions, instruction set or device, the context
    length that rotary frequencies are made for, and ranks."""
    kernels: Text = ""
    """The library that computes, if results are exact. Otherwise a successor may have another one,
    or none."""
    tokenizer: Text = ""
    """Digest of the model's tokenizer.json, and of its weights in the next field: a client sends
    requests only to engines with its own (`protocol.process.model_files`). Empty: not known."""
    weights: Text = ""

    @property
    def fingerprint(self) -> str:
        """A digest of everything that determines which tokens a request gets.

        A request continues exactly at an engine with the fingerprint of the engine that began it.
        The fingerprint covers neither memory sizes nor the maximum context length, which depends on
        them, nor, if results are not exact, `decoder` and `kernels`.
        """
        encoded = msgspec.msgpack.encode(self._decisive())
        return hashlib.blake2b(encoded, digest_size=_FINGERPRINT_BYTES).hexdigest()

    def decisive_changes(self, before: "ModelFacts") -> str:
        """Describe the differences that change the fingerprint."""
        return self._decisive().changes(before._decisive())

    def _decisive(self) -> "ModelFacts":
        return msgspec.structs.replace(
            self,
            model="" if self.checkpoint else self.model,
            exact_resume_reason="",
            decoder=self.decoder if self.exact_resume else "",
            speculation="",
            max_model_len=2,
            num_gpu_blocks=2,
            num_host_blocks=0,
            num_state_blocks=0,
            num_host_state_blocks=0,
            state_swap_blocks=0.0,
            kv_layout="",
            tokenizer="",  # covered by the checkpoint
            weights="",
        )

    def can_replace(self, before: "ModelFacts") -> bool:
        """Return whether workers with these facts can continue.

        Only `exact_resume` and its reason may differ; also `decoder`, unless `before` was exact,
        and `kernels`, unless both are exact.
        """
        is_promised = self.exact_resume and before.exact_resume
        return self == msgspec.structs.replace(
            before,
            exact_resume=self.exact_resume,
            exact_resume_reason=self.exact_resume_reason,
            decoder=before.decoder if before.exact_resume else self.decoder,
            kernels=before.kernels if is_promised else self.kernels,
        )

    def changes(self, before: "ModelFacts") -> str:
        """Describe the differences from other facts."""
        found = []
        for name in self.__struct_fields__:
            old, new = getattr(before, name), getattr(self, name)
            if new != old:
                found.append(f"{name} {new!r} instead of {old!r}")
        return ", ".join(found)

    def max_prompt_len(self, params: SamplingParams) -> int:
        """Return the maximum length of a prompt in tokens; it leaves room for any output."""
        return self.max_model_len if params.pooling is not None else self.max_model_len - 1

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the maximum number of KV blocks that a request of `num_tokens` tokens holds."""
        num_blocks = -(-num_tokens // self.block_size)
        return sum(
            num_blocks if group.max_blocks is None else min(num_blocks, group.max_blocks)
            for group in self.kv_groups
            if not group.is_state
        )
