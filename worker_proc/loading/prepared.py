"""A model as the processes that compute it share it."""

from typing import NamedTuple

from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.loading.loader import LoadedModel
from worker_proc.loading.start_cache import StartCache
from worker_proc.native.kernels import NativeLibrary


class PreparedModel(NamedTuple):
    """A model with fused and packed modules, and the native kernels, if any."""

    loaded: LoadedModel
    kernels: NativeLibrary | None
    grammars: GrammarCompiler | None = None
    proofs: StartCache | None = None
    """What is proven about this model at each start is kept here."""
    draft: LoadedModel | None = None
    """The draft model, whose modules are fused and packed, too."""

    def of_draft(self, draft: LoadedModel) -> "PreparedModel":
        """Return the draft model as a model of its own."""
        return PreparedModel(draft, self.kernels)
