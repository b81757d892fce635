"""The model that a client's engines must have: requests for it go nowhere else.

The owner of the client may know the model's files; engines of other machines are then compared with
them. Engines of this machine have read the same files, perhaps at another time. In addition, all
engines are compared with the one that was the first to serve, as long as any engine still has its
model.
"""

from collections.abc import Iterable

from protocol.config.addresses import is_remote
from protocol.model_facts import ModelFacts
from protocol.process.model_files import ModelFiles

_UNKNOWN = ModelFiles()


class ExpectedModel:
    """Compares engines with the model that is known."""

    def __init__(self, own: ModelFiles | None = None, *, learns: bool = True) -> None:
        """Compare with `own`, the digests of the model's files on this machine, if they are known.

        With `learns`, the model of the first engine that serves is expected as well.
        """
        self._own = own or _UNKNOWN
        self._learns = learns
        self._learned = _UNKNOWN

    def difference(self, facts: ModelFacts, address: str) -> str:
        """Describe how the model of an engine differs; empty: requests may go there."""
        known = [self._own] if is_remote(address) else []
        found = (each.difference(facts) for each in (*known, self._learned))
        return next(filter(None, found), "")

    def learn(self, facts: ModelFacts) -> None:
        """Expect the model of this engine, if it is the first one to serve.

        If the first one publishes only one of the two digests, the other one is learned from the
        next engine that has the same first digest and publishes both.
        """
        learned, found = self._learned, _files_of(facts)
        if self._learns and (learned == _UNKNOWN or _has(found, learned)):
            self._learned = ModelFiles(
                learned.tokenizer or found.tokenizer, learned.weights or found.weights
            )

    def keep_if_present(self, engines: Iterable[ModelFacts | None]) -> None:
        """Forget the learned model once none of these engines has it."""
        if self._learned == _UNKNOWN:
            return
        if not any(facts and _has(_files_of(facts), self._learned) for facts in engines):
            self._learned = _UNKNOWN


def _has(files: ModelFiles, model: ModelFiles) -> bool:
    """Return whether all digests that both have are equal, and there are any."""
    common = [pair for pair in zip(files, model, strict=True) if all(pair)]
    return bool(common) and all(one == other for one, other in common)


def _files_of(facts: ModelFacts) -> ModelFiles:
    return ModelFiles(facts.tokenizer, facts.weights)
