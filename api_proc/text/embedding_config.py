"""How a checkpoint was trained to embed, read from the files of sentence-transformers."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from api_proc.text.checkpoint import read_json
from api_proc.text.processor import NULL_MODEL
from protocol.config import ModelConfig
from protocol.sampling import PoolingType

_MODES = {
    "pooling_mode_lasttoken": PoolingType.LAST,
    "pooling_mode_mean_tokens": PoolingType.MEAN,
}


class EmbeddingConfig(NamedTuple):
    """How the model was trained to embed."""

    pooling: PoolingType = PoolingType.LAST
    can_shorten: bool = False
    """Whether the first numbers of a vector are a vector, too (Matryoshka representations)."""
    dimensions: tuple[int, ...] = ()
    """The lengths that were trained; empty: any."""


@lru_cache(maxsize=8)
def _read(directory: str) -> EmbeddingConfig:
    modes = read_json(Path(directory) / "1_Pooling" / "config.json")
    pooling = next((kind for name, kind in _MODES.items() if modes.get(name)), PoolingType.LAST)
    config = read_json(Path(directory) / "config.json")
    trained = config.get("matryoshka_dimensions")
    dimensions = tuple(n for n in trained if isinstance(n, int)) if trained else ()
    return EmbeddingConfig(pooling, bool(dimensions or config.get("is_matryoshka")), dimensions)


def embedding_config(model: ModelConfig) -> EmbeddingConfig:
    """Read the files once; the vectors of the null model may have any length."""
    if model.model == NULL_MODEL:
        return EmbeddingConfig(can_shorten=True)
    return _read(model.model)
