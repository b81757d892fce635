"""Which weights of a quantized checkpoint stay codes in memory, and why others do not."""

from collections import Counter
from collections.abc import Iterable

import torch


class CodesReport:
    """What became of the weights of one checkpoint, by the names of their layers."""

    def __init__(self, method: str) -> None:
        self.method = method
        self._kinds: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._stated: str | None = None

    def add(self, layer: str, kind: str, reason: str = "") -> None:
        """Note a weight in codes of some kind that stay; with a reason, one that is dequantized."""
        self._kinds[layer] = kind
        self._reasons[layer] = reason

    def state(self, kinds: Iterable[str]) -> None:
        """Let the description name these codes, whatever becomes of the weights that are loaded.

        So ranks, which load some of the weights each, describe the model alike.
        """
        self._stated = self._described(*sorted(set(kinds)))

    @property
    def description(self) -> str:
        """The format and its codes that are in memory, in words; empty: there are none."""
        if self._stated is not None:
            return self._stated
        kinds = {kind for layer, kind in self._kinds.items() if not self._reasons[layer]}
        return self._described(*sorted(kinds)) if kinds else ""

    def lines(self, dtype: torch.dtype) -> list[str]:
        """Return a sentence for the weights that stay codes, and one for each reason of others."""
        counts = Counter((kind, self._reasons[layer]) for layer, kind in self._kinds.items())
        computed = str(dtype).removeprefix("torch.")
        return [
            f"{self._described(kind)}: {count} weights "
            + (f"are dequantized to {computed}: {reason}" if reason else "stay codes")
            for (kind, reason), count in sorted(counts.items())
        ]

    def _described(self, *kinds: str) -> str:
        return " ".join(dict.fromkeys([self.method, *kinds]))
