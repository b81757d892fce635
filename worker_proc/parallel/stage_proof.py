"""Proves that a stage's results depend only on the rows that it gets from the previous stage."""

from typing import Any

import torch

from worker_proc.attention.interface import transformers_attention
from worker_proc.calibration.same_bits import have_same_bits
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.passages import StageModel
from worker_proc.parallel.stages import hidden_size, refuse_stages
from worker_proc.recurrent.layers import own_forwards

_NUM_CHECKED_ROWS = 5


@torch.inference_mode()
def check_rows(loaded: LoadedModel, stage: StageModel, num_stages: int) -> str:
    """Return the dtype of the rows that a layer passes on, which may be wider than the model's.

    Raises UnsupportedModel for a model whose layers take more than the rows of the previous stage
    and, if these are passed on, the rows of the embedding. Three properties are checked: other
    tokens do not change the results for the same rows; the stage's first layer gets the rows
    unchanged; and the next stage's first layer gets no further output of the stage's last layer,
    such as the states of a router.
    """
    model, shape = loaded.model, (1, _NUM_CHECKED_ROWS, stage.row_width)
    rows = torch.randn(shape, generator=make_generator(3)).to(loaded.dtype)
    outputs: list[torch.Tensor] = []
    begun, ended, passed = _Seen(), _Seen(), _Seen()
    handles = [
        model.get_submodule(stage.first_layer).register_forward_pre_hook(
            lambda _, args, kwargs: begun.take(args or (kwargs["hidden_states"],)), with_kwargs=True
        ),
        model.get_submodule(stage.last_layer).register_forward_hook(
            lambda _, args, output: ended.take(output)
        ),
    ]
    if stage.outlet is not None:
        handles.append(
            stage.outlet.register_forward_pre_hook(
                lambda _, args, kwargs: passed.take((*args, *kwargs.values())), with_kwargs=True
            )
        )
    try:
        for first in range(2):
            if stage.inlet is not None:
                stage.take(rows)
            tokens = torch.arange(first, first + _NUM_CHECKED_ROWS) * 7919 % loaded.vocab_size
            with transformers_attention(model), own_forwards(model):
                outputs.append(model(input_ids=tokens.unsqueeze(0), use_cache=False).logits)
    except Exception as error:
        reason = f"the forward of its layers fails: {type(error).__name__}: {error}"
        raise refuse_stages(num_stages, reason) from error
    finally:
        for handle in handles:
            handle.remove()
        stage.forget()
    given = rows[..., : hidden_size(model)]
    if stage.inlet is not None and not _are_equal(begun.rows, given):
        raise refuse_stages(num_stages, "its model changes the rows between two layers")
    is_passed = any(one is other for one in ended.others for other in passed.others)
    if is_passed or (stage.outlet is not None and stage.rows().shape != shape):
        raise refuse_stages(num_stages, "its layers pass on more than a row for each token")
    if stage.inlet is not None and not have_same_bits(*outputs):
        raise refuse_stages(num_stages, "its layers take more than the rows of the layer before")
    assert ended.rows is not None
    return str(ended.rows.dtype).removeprefix("torch.")


def _are_equal(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return (
        found is not None
        and found.shape == expected.shape
        and found.dtype == expected.dtype
        and have_same_bits(found, expected)
    )


class _Seen:
    """The rows that a layer takes or returns, and the further tensors of floats.

    Tensors of integers do not count: they are the tokens that an indexer selects, which are all
    tokens.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.others: list[torch.Tensor] = []

    def take(self, values: Any) -> None:
        """Store the first value as the rows, and the tensors of floats among the others."""
        self.rows, *others = values if isinstance(values, tuple) else (values,)
        tensors = [one for one in others if isinstance(one, torch.Tensor)]
        self.others = [one for one in tensors if one.is_floating_point()]
