"""Shows that nothing but rows passes from a stage to the next one."""

from typing import Any

import torch

from worker_proc.attention.interface import transformers_attention
from worker_proc.calibration.self_check import have_same_bits
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.loader import LoadedModel
from worker_proc.loading.passages import StageModel
from worker_proc.parallel.stages import hidden_size, refuse_stages
from worker_proc.recurrent.layers import own_forwards

_NUM_CHECKED_ROWS = 5


@torch.inference_mode()
def check_rows(loaded: LoadedModel, stage: StageModel, num_stages: int) -> str:
    """Return the type of the rows that a layer passes on; it may be wider than the model's.

    Refuses a model whose layers take more than the rows of the stage before, and those of the
    embedding if these pass, too. So other tokens must not change what is computed from them, the
    first layer must get them as they are, and the next stage's first layer must not get a further
    output of the last layer, such as the states of a router.
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
    """The rows that a layer takes or returns, and the numbers beside them.

    Integers do not count: they are the tokens that an indexer selects, which are all tokens.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.others: list[torch.Tensor] = []

    def take(self, values: Any) -> None:
        """Keep the first value, and of the others the tensors of floats."""
        self.rows, *others = values if isinstance(values, tuple) else (values,)
        tensors = [one for one in others if isinstance(one, torch.Tensor)]
        self.others = [one for one in tensors if one.is_floating_point()]
