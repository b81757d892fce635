"""Reasons why a checkpoint cannot be served; raised while loading, and final."""


class UnsupportedModel(ValueError):
    """The model cannot be computed correctly here; the text names the part and the reason."""


class CheckpointError(ValueError):
    """The checkpoint is incomplete or wrong; the text names the file, and the key or tensor."""


class InsufficientMemory(ValueError):
    """The weights do not fit, or the KV cache cannot hold a sequence of the configured length."""
