"""Contexts that change how transformers places and reports the weights that it loads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import core_model_loading, modeling_utils
from transformers.utils import logging as transformers_logging

from worker_proc.loading.transformers_log import quiet_transformers
from worker_proc.runner import ReportProgress


@contextmanager
def straight_to(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield options that read each weight directly to `device`, never all of them to the host.

    For a single device transformers needs nothing from `accelerate`, but checks for it nonetheless.
    """
    check = getattr(modeling_utils, "check_and_set_device_map", None)
    if device.type == "cpu" or check is None:
        yield {}
        return
    modeling_utils.check_and_set_device_map = lambda device_map: device_map
    copy_tensor = core_model_loading._materialize_copy
    if device.type == "meta":  # tensors that are assembled on the host have no values, either
        core_model_loading._materialize_copy = lambda tensor, _, dtype: copy_tensor(
            tensor, device, dtype
        )
    try:
        yield {"device_map": {"": device}}
    finally:
        modeling_utils.check_and_set_device_map = check
        core_model_loading._materialize_copy = copy_tensor


@contextmanager
def reported(progress: ReportProgress) -> Iterator[None]:
    """Connect transformers' progress bar for weights to `progress`, and print nothing."""

    def iterate(items: Any) -> Iterator[Any]:
        total = len(items)
        for done, item in enumerate(items):
            progress("load_weights", done, total)
            yield item
        progress("load_weights", total, total)

    def hook(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and hasattr(args[0], "__len__"):
            return iterate(args[0])
        return factory(*args, **{**kwargs, "disable": True})

    previous = transformers_logging.set_tqdm_hook(hook)
    try:
        with quiet_transformers():
            yield
    finally:
        transformers_logging.set_tqdm_hook(previous)
