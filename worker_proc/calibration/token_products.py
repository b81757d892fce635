"""Records products of two matrices that each token has, such as those that mix its streams.

Libraries may compute many small products differently from a few. So the products of a forward are
recorded, and repeated with other numbers of tokens.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from worker_proc.calibration.same_bits import have_same_bits

_PRODUCTS = frozenset(("matmul", "__matmul__", "bmm"))
_Factors = tuple[torch.Tensor, torch.Tensor]


class TokenProducts(TorchFunctionMode):
    """Records such products over one row of `num_tokens` within the context."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self._found: dict[tuple[Any, ...], _Factors] = {}
        """One product for each function, dtype and layout."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kind = getattr(func, "__name__", "")
        if kind in _PRODUCTS and len(args) == 2 and all(map(self._is_of_tokens, args)):
            layouts = ((factor.dtype, *factor.shape, *factor.stride()) for factor in args)
            self._found.setdefault((kind, *layouts), (args[0], args[1]))
        return func(*args, **(kwargs or {}))

    def _is_of_tokens(self, factor: object) -> bool:
        """Return whether a factor is `[..., num_tokens, rows, columns]`, and is not a weight."""
        if not isinstance(factor, torch.Tensor) or isinstance(factor, torch.nn.Parameter):
            return False
        leading = factor.shape[:-2]
        return bool(leading) and leading.numel() == leading[-1] == self._num_tokens

    @torch.inference_mode()
    def difference(self, counts: Iterable[int]) -> str:
        """Return the reason if a product depends on the number of tokens; empty: none does."""
        numbers = list(counts)
        for one, other in self._found.values():
            expected = one @ other
            for count in numbers:
                index = torch.arange(count) % self._num_tokens
                found = _repeated(one, index) @ _repeated(other, index)
                if not have_same_bits(found, expected.index_select(-3, index)):
                    sizes = f"{list(one.shape[-2:])} by {list(other.shape[-2:])}"
                    return f"a product of {sizes} for each token has other bits among {count}"
        return ""


def _repeated(factor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Repeat tokens of a factor; a transposed one stays transposed."""
    if factor.stride(-1) == 1:
        return factor.index_select(-3, index)
    return factor.mT.contiguous().index_select(-3, index).mT
