"""Why a checkpoint cannot be served: raised while loading, before any request."""


class UnsupportedModel(ValueError):
    """The model cannot be computed correctly here; the text says which part and why."""


class CheckpointError(ValueError):
    """The directory is no complete checkpoint; the text names the file or tensor."""


class InsufficientMemory(ValueError):
    """The KV cache cannot hold one sequence of the length asked for."""
