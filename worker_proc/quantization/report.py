"""Records which weights of a quantized checkpoint stay codes, and why others are dequantized."""

from collections import Counter
from collections.abc import Iterable

import torch


class CodesReport:
    """The weights of one checkpoint that stay codes, and the reasons of the others."""

    def __init__(self, method: str) -> None:
        self.method = method
        self._kinds: dict[str, str] = {}
        self._reasons: dict[str, str] = {}
        self._stated: str | None = None

    def add(self, layer: str, kind: str, reason: str = "") -> None:
        """Record a weight whose codes stay; with a reason, a weight that is dequantized."""
        self._kinds[layer] = kind
        self._reasons[layer] = reason

    def state(self, kinds: Iterable[str]) -> None:
        """Set the kinds of codes that the description names, regardless of the weights loaded here.

        So all ranks describe the model alike, although each loads only some of the weights.
        """
        self._stated = self._described(*sorted(set(kinds)))

    @property
    def description(self) -> str:
        """The format, and the kinds of codes that are in memory; empty: there are none."""
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
