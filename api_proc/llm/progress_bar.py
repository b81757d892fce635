"""The progress bar of a list of prompts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from api_proc.llm.beams import BeamSearchOutput
from api_proc.llm.outputs import EmbeddingRequestOutput, RequestOutput

UseTqdm = bool | Callable[..., Any]
"""Whether there is a bar, or the function that makes it."""


@contextmanager
def progress_bar(use_tqdm: UseTqdm, total: int) -> Iterator[Callable[[Any], None]]:
    """Show a bar with the rates of tokens; yield the function to call with each result."""
    if not use_tqdm or not total:
        yield lambda output: None
        return
    make = use_tqdm
    if not callable(make):
        from tqdm.auto import tqdm

        make = tqdm
    bar = make(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
    num_input = num_output = 0

    def on_end(output: RequestOutput | EmbeddingRequestOutput | BeamSearchOutput) -> None:
        nonlocal num_input, num_output
        if isinstance(output, BeamSearchOutput):
            bar.update(1)
            return
        num_input += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            num_output += sum(len(item.token_ids) for item in output.outputs)
        elapsed_s = max(1e-6, bar.format_dict["elapsed"])
        bar.set_postfix_str(
            f"input {num_input / elapsed_s:.0f} tok/s, output {num_output / elapsed_s:.0f} tok/s",
            refresh=False,
        )
        bar.update(1)

    try:
        yield on_end
    finally:
        bar.close()
