"""A model and the memory in which it computes steps, as used by all runners."""

from typing import NamedTuple

from protocol.model_facts import ModelFacts
from worker_proc.adapters.store import AdapterStore
from worker_proc.attention.interface import AttentionBackend
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.kv.kv_pool import KVPool
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.offload.memory import BlockMemory


class ModelWithCache(NamedTuple):
    """A model whose attention modules are attached to a backend and the blocks of a pool."""

    loaded: LoadedModel
    facts: ModelFacts
    """The facts announced to the core."""
    backend: AttentionBackend
    pool: KVPool
    swap_cost_tokens: float
    """Cost of copying a block to the host and back, in computed prompt tokens."""
    num_speculative_tokens: int = 0
    """Maximum number of drafts of a request in one step."""
    num_draft_states: int = 0
    """State blocks in the pool beyond the announced ones."""
    grammars: GrammarCompiler | None = None
    adapters: AdapterStore | None = None
    block_memory: BlockMemory | None = None
    state_memory: BlockMemory | None = None
    """Blocks and states in the form that stores use, if they are kept there."""
