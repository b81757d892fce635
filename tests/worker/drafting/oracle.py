"""Requests of many parameters, and drafts that are right but for a wrong id now and then."""

from collections.abc import Sequence
from typing import Any

from protocol.sampling import SamplingParams
from worker_proc.drafting.ngram_index import NgramIndex

NUM_DRAFTS = 4
MAX_TOKENS = 40
FEW = dict.fromkeys((17, 23, 99, 260), 60.0)
"""With this bias almost only four tokens are chosen, so that pairs of them repeat."""


def make_params(**more: Any) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
    return SamplingParams(**(fields | more))


PARAMS = [
    make_params(),
    make_params(logprobs=2),
    make_params(logit_bias=FEW),
    make_params(logit_bias=FEW, logprobs=3, prompt_logprobs=1),
    make_params(logit_bias=FEW, repetition_penalty=1.2, frequency_penalty=0.4),
    make_params(logit_bias=FEW, presence_penalty=1.0, logprobs=0),
    make_params(logit_bias=FEW, temperature=0.7, seed=3),
    make_params(logit_bias=FEW, temperature=1.2, seed=4, top_p=0.9, logprobs=1),
    make_params(logit_bias=FEW, temperature=1.0, seed=5, top_k=3, frequency_penalty=0.2),
    make_params(logit_bias=FEW | {2: 62.0}, ignore_eos=False, min_tokens=25),
    make_params(logit_bias=FEW | {2: 58.0}, temperature=2.0, seed=6, ignore_eos=False),
    make_params(temperature=0.8, seed=7, min_p=0.1, repetition_penalty=1.3, logprobs=2),
    make_params(logit_bias=FEW, temperature=1.0, seed=8, bad_words=[[17, 23], [99, 260, 99]]),
]
PROMPTS = [[5 + number, *([17, 23, 99, 260] * 5), 40 + number] for number in range(len(PARAMS))]
"""Each is longer than a window and than a chunk."""


class Oracle(NgramIndex):
    """Drafts the true continuation, with a wrong id now and then."""

    texts: Sequence[list[int]] = ()

    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        """The true continuation, with a wrong id at a place that the last ids decide."""
        known = len(token_ids)
        text = next((t for t in self.texts if t[:known] == token_ids), [])
        drafts = text[known : known + max_tokens]
        wrong = hash(tuple(token_ids[-3:])) % (max_tokens + 2)
        if wrong < len(drafts):
            drafts[wrong] = (drafts[wrong] + 1) % 512
        return drafts
