"""Prompts, and the tokens that an engine in one process computes for them."""

from typing import Any

from api_proc.llm import LLM, SamplingParams
from protocol.config.settings import configure
from scripts.inprocess import InprocEngine

PROMPTS = [[5, 6, 7, n] for n in range(100)]
GREEDY = SamplingParams(temperature=0, max_tokens=80)
SETTINGS: dict[str, Any] = {"null_step_ms": 1.0, "max_num_seqs": 16, "log_level": "error"}


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def expected(prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Return the tokens of the engine in one process."""
    llm = LLM(engine=InprocEngine(configure(model="null")))
    try:
        return token_ids(llm.generate(prompts, params, use_tqdm=False))
    finally:
        llm.close()


class Bar:
    """Counts as tqdm does."""

    def __init__(self, **options: Any) -> None:
        self.total = options["total"]
        self.count = 0
        self.is_closed = False
        self.format_dict = {"elapsed": 1.0}

    def update(self, number: int) -> None:
        self.count += number

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.text = text

    def close(self) -> None:
        self.is_closed = True
