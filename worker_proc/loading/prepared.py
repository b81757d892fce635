"""A model as the processes that compute it share it."""

from typing import NamedTuple

from worker_proc.adapters.store import AdapterStore
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.loading.layer_executor import LayerExecutor
from worker_proc.loading.loader import LoadedModel
from worker_proc.loading.passages import StageModel
from worker_proc.loading.start_cache import StartCache
from worker_proc.native.kernels import NativeLibrary


class PreparedModel(NamedTuple):
    """A model with fused and packed modules, and what computes it faster, if anything does."""

    loaded: LoadedModel
    kernels: NativeLibrary | None
    grammars: GrammarCompiler | None = None
    executor: LayerExecutor | None = None
    """It reads and computes the layers of the draft model, too."""
    proofs: StartCache | None = None
    """What is proven about this model at each start is kept here; on the CPU only."""
    draft: LoadedModel | None = None
    """The draft model, whose modules are fused and packed, too."""
    adapters: AdapterStore | None = None
    """Only with enable_lora. The draft model has none."""
    checkpoint: str = ""
    """Names the contents of its files: see `checkpoint_identity`."""

    stage: StageModel | None = None
    """What passes rows in and out of a model that has some of the layers only."""

    def of_draft(self, draft: LoadedModel) -> "PreparedModel":
        """Return the draft model as a model of its own."""
        return PreparedModel(draft, self.kernels, executor=self.executor)
