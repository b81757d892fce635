"""Records the arguments of attention modules, and calls them with other rows and caches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from worker_proc.errors import UnsupportedModel
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.modules.trial_calls import first_calls
from worker_proc.recurrent.cache_argument import CACHE

NUM_TOKENS = 7


class Inputs(NamedTuple):
    """The arguments of an attention module, and the cache among them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: object

    def call(self, module: nn.Module, rows: torch.Tensor, cache: object) -> torch.Tensor:
        """Return the module's output for `[1, NUM_TOKENS, size]`; a residual is zero."""
        is_given = False

        def filled(value: Any) -> Any:
            nonlocal is_given
            if value is self.cache:
                return cache
            if not isinstance(value, torch.Tensor) or value.shape != rows.shape:
                return value
            is_first, is_given = not is_given, True
            return rows if is_first else torch.zeros_like(rows)

        args = tuple(map(filled, self.args))
        result = module(*args, **{key: filled(value) for key, value in self.kwargs.items()})
        return cast(torch.Tensor, result[0] if isinstance(result, tuple) else result)

    def random_rows(self, device: torch.device) -> torch.Tensor:
        """Return random rows of the recorded shape, `[1, NUM_TOKENS, size]`; always the same."""
        shape = next(
            value.shape
            for value in (*self.args, *self.kwargs.values())
            if isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point()
        )
        return torch.randn(shape, generator=make_generator(1)).to(device)


def record_inputs(
    loaded: LoadedModel, module: nn.Module, cache: object, num_past: int, num_rows: int
) -> Inputs:
    """Return the first attention module's arguments, in float32, with `num_past` cached tokens."""
    decoder: nn.Module = loaded.model.get_decoder()
    size = loaded.model.config.get_text_config(decoder=True).hidden_size
    rows = torch.zeros(1, num_rows, size, device=loaded.device)
    positions = torch.arange(num_past, num_past + num_rows, device=loaded.device).unsqueeze(0)

    def forward() -> None:
        decoder(inputs_embeds=rows, position_ids=positions, **{CACHE: cache})

    try:
        with _norms_pass_rows(decoder):
            calls = first_calls([module], forward)
    except UnsupportedModel:
        raise
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        kind = loaded.model.config.model_type
        raise UnsupportedModel(f"{kind}: its forward fails with a cache: {error}") from error
    if not calls:
        raise UnsupportedModel(f"{loaded.model.config.model_type}: its forward does not attend")
    return Inputs(*calls[type(module)], cache)


@contextmanager
def _norms_pass_rows(model: nn.Module) -> Iterator[None]:
    """Make norms return their input, so that float32 rows reach attention in a model of any dtype.

    The values of these rows are not used: random rows replace them.
    """
    norms = [
        module
        for module in model.modules()
        if (parameters := [*module.parameters(recurse=False)])
        and all(parameter.dim() == 1 for parameter in parameters)
        and next(module.children(), None) is None
    ]
    pass_rows: Callable[..., torch.Tensor] = lambda rows: rows  # noqa: E731
    for module in norms:
        module.__dict__["forward"] = pass_rows
    try:
        yield
    finally:
        for module in norms:
            del module.__dict__["forward"]
