"""A model in the form that the computing processes share."""

from typing import NamedTuple

from protocol.process.model_files import ModelFiles
from worker_proc.adapters.store import AdapterStore
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.loading.layer_executor import LayerExecutor
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.passages import StageModel
from worker_proc.loading.start_cache import StartCache
from worker_proc.native.kernels import NativeLibrary


class PreparedModel(NamedTuple):
    """A model with fused and packed modules, and the executor of its layers, if there is one."""

    loaded: LoadedModel
    kernels: NativeLibrary | None
    grammars: GrammarCompiler | None = None
    executor: LayerExecutor | None = None
    """The executor also reads and computes the layers of the draft model."""
    proofs: StartCache | None = None
    """Stores the proofs about this model between starts; on the CPU only."""
    draft: LoadedModel | None = None
    """The draft model, whose modules are fused and packed, too."""
    adapters: AdapterStore | None = None
    """Set only with enable_lora; the draft model has no adapters."""
    checkpoint: str = ""
    """Identifies the contents of its files: see `checkpoint_identity`."""
    files: ModelFiles = ModelFiles()
    """Digests of its tokenizer and weights, which clients compare."""
    stage: StageModel | None = None
    """The passages of a model that has only some of the layers."""

    def of_draft(self, draft: LoadedModel) -> "PreparedModel":
        """Return the draft model as a separate prepared model."""
        return PreparedModel(draft, self.kernels, executor=self.executor)
