"""The checkpoint's settings for embeddings: its defaults, and the options of requests."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from api_proc.errors import invalid
from api_proc.text.checkpoint import read_json
from protocol.config import ModelConfig
from protocol.config.sentence_modules import SentenceModules, read_sentence_modules
from protocol.process.model_files import NULL_MODEL


class EmbeddingConfig(NamedTuple):
    """The settings with which the model was trained to embed."""

    modules: SentenceModules = SentenceModules()
    can_shorten: bool = False
    """True if a prefix of a vector is also a valid vector (Matryoshka representations)."""
    dimensions: tuple[int, ...] = ()
    """The trained vector lengths; empty: any."""

    def prompt(self, name: str | None) -> str:
        """Return the text to prepend: the prompt with this name, or the checkpoint's default.

        An empty name means no text.
        """
        modules = self.modules
        if name is None:
            name = modules.default_prompt_name
        if not name:
            return ""
        if name not in modules.prompts:
            known = ", ".join(map(repr, modules.prompts)) or "none"
            raise invalid("prompt_name", f"the checkpoint has no prompt {name!r}; it has {known}")
        if modules.prompts[name] and not modules.pools_prompts:
            message = "the checkpoint leaves prompts out of its pooling, which is not supported"
            raise invalid("prompt_name", message)
        return modules.prompts[name]

    def texts(self, texts: list[str], prompt_name: str | None) -> list[str]:
        """Return the texts to tokenize."""
        prompt = self.prompt(prompt_name)
        texts = [prompt + text for text in texts] if prompt else texts
        return [text.lower() for text in texts] if self.modules.lowers_case else texts


@lru_cache(maxsize=8)
def _read(directory: str) -> EmbeddingConfig:
    modules = read_sentence_modules(Path(directory))
    config = read_json(Path(directory) / "config.json")
    trained = config.get("matryoshka_dimensions")
    dimensions = tuple(n for n in trained if isinstance(n, int)) if trained else ()
    return EmbeddingConfig(modules, bool(dimensions or config.get("is_matryoshka")), dimensions)


def embedding_config(model: ModelConfig) -> EmbeddingConfig:
    """Read the files once; vectors of the null model may have any length."""
    if model.model == NULL_MODEL:
        return EmbeddingConfig(can_shorten=True)
    return _read(model.model)
