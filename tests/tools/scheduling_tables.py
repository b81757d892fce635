"""Print the tables of docs/scheduling.md: `python -m tests.tools.scheduling_tables`.

Each table is a small workload on the real scheduler. The output is the same on every machine, and a
test compares it with the page. To try something else, change a workload here, or write one for
`scripts.schedule_trace`.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from protocol.config.settings import configure
from protocol.sampling import SamplingParams
from scripts.inprocess import InprocEngine
from scripts.schedule_trace import Record, Replay, prompt_stream


def ask(num_tokens: int, max_tokens: int, arrival_step: int = 0, **more: Any) -> Record:
    """One request of a workload; `steps_of` adds its id."""
    prompt = {"len": num_tokens}
    return {
        "prompt_token_ids": prompt,
        "max_tokens": max_tokens,
        "arrival_step": arrival_step,
    } | more


def steps_of(requests: Mapping[str, Record], **config: Any) -> list[Record]:
    """Run a workload, without prefix caching by default; returns a record for each step."""
    rows = []
    for name, request in requests.items():
        prompt = {"seed": name} | request["prompt_token_ids"]
        rows.append(request | {"id": name, "prompt_token_ids": prompt})
    config = {"enable_prefix_caching": False} | config
    return list(Replay({"config": config, "requests": rows}).records())


def granted(record: Record) -> dict[str, int]:
    """Return the tokens granted in one step, by request."""
    return dict(record.get("num_scheduled_tokens", ()))


def num_granted(record: Record) -> int:
    """Return the tokens granted in one step, in total."""
    return sum(granted(record).values())


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> list[str]:
    return [_row(head), "|" + "---|" * len(head), *map(_row, rows)]


def _events(record: Record) -> str:
    words = [f"{name} is preempted" for name in record["preempted"]]
    words += [f"{name} resumes" for name, _ in record["resumed"]]
    words += [f"{name} ends" for name, _ in record["finished"]]
    return ", ".join(words)


def _step_table(names: Sequence[str], records: Sequence[Record], *, blocks: bool) -> list[str]:
    """Return a line per step that computed anything: tokens by request, and what happened."""
    rows = []
    for record in records:
        grants = granted(record)
        if not grants:
            continue
        row = [record["step"], *(grants.get(name, "") for name in names), sum(grants.values())]
        if blocks:
            row.append(record["num_free_blocks"])
        rows.append([*row, _events(record)])
    head = ["step", *names, "tokens"] + (["free blocks"] if blocks else []) + ["events"]
    return _table(head, rows)


class Lab(NamedTuple):
    """A section of the page: a workload and what it shows."""

    title: str
    text: str
    requests: dict[str, Record]
    config: dict[str, Any]
    blocks: bool = False
    """Whether the table shows the free blocks."""

    def lines(self) -> list[str]:
        """The section in Markdown."""
        records = steps_of(self.requests, **self.config)
        table = _step_table(list(self.requests), records, blocks=self.blocks)
        return [f"### {self.title}", "", self.text, "", *table]


STEP_LABS = (
    Lab(
        "The budget is handed out in order and clamps the last",
        "Three prompts of 8 tokens, 10 tokens a step: 8 + 2 + 0. Running requests are then served"
        " before any admission.",
        {name: ask(8, 2) for name in "abc"},
        {"max_num_batched_tokens": 10},
    ),
    Lab(
        "Slots limit running requests, not accepted ones",
        "Ten prompts of 10 tokens, four slots: four are admitted, the next four when these end.",
        {name: ask(10, 2) for name in "abcdefghij"},
        {"max_num_seqs": 4},
    ),
    Lab(
        "The threshold cuts a long prompt",
        "One prompt of 100 tokens, `long_prefill_token_threshold` 16, a budget of 2,048.",
        {"a": ask(100, 2)},
        {"long_prefill_token_threshold": 16},
    ),
    Lab(
        "Running comes before waiting",
        "a decodes; b arrives in step 1 with 40 tokens, 16 tokens a step. a gets its token in every"
        " step, and b gets the rest.",
        {"a": ask(12, 5), "b": ask(40, 2, 1)},
        {"max_num_batched_tokens": 16},
    ),
    Lab(
        "Memory exhausted: admission stops, and nothing fails",
        "Five blocks of 16 tokens. a holds three; b needs four and waits; c needs one, but is"
        " behind b. When a has ended, both are admitted.",
        {"a": ask(40, 3), "b": ask(64, 1, 1), "c": ask(10, 3, 1)},
        {"num_gpu_blocks": 6},
        blocks=True,
    ),
    Lab(
        "Preemption: the last request is preempted, resumes, and loses nothing",
        "Six blocks, three prompts of 30 tokens. In step 3, a and b need a third block each, and c"
        " is preempted for them. It resumes with 33 tokens, its prompt and three outputs, and ends"
        " with all 8.",
        {name: ask(30, 8) for name in "abc"},
        {"num_gpu_blocks": 7},
        blocks=True,
    ),
)


SHARING = {
    name: ask(68, 1, prompt_token_ids={"len": 68, "shared_prefix": {"seed": "all", "len": 64}})
    for name in "abcdefgh"
}
"""Eight requests of 68 tokens; the first 64, four blocks, are the same."""


def _prefix_cache_lines() -> list[str]:
    num_prompt = sum(request["prompt_token_ids"]["len"] for request in SHARING.values())
    rows = []
    for caching in (False, True):
        records = steps_of(SHARING, enable_prefix_caching=caching)
        num_found = sum(found for record in records for _, found in record.get("new", ()))
        num_computed = sum(map(num_granted, records))
        assert num_computed + num_found == num_prompt
        state = "on" if caching else "off"
        rows.append([state, num_prompt, num_found, num_computed, f"{num_found / num_prompt:.1%}"])
    return [
        "### What the prefix cache saves",
        "",
        "Eight requests of 68 tokens that share the first 64, four blocks. The first computes all"
        " 68. Its blocks can be hit as soon as they are scheduled, so the other seven compute 4"
        " each in the same step: 68 + 7 x 4 = 96.",
        "",
        *_table(["caching", "prompt tokens", "found", "computed", "hit rate"], rows),
    ]


LONG_PREFILL = {"d": ask(16, 13), "p": ask(256, 4, 1)}
"""One request decodes when a prompt of 256 tokens arrives."""
_SHOWN_STEPS = 12


def spike(threshold: int) -> list[int]:
    """Return the tokens of each step in which d decodes, from the arrival of p on."""
    records = steps_of(LONG_PREFILL, long_prefill_token_threshold=threshold)
    return [num_granted(record) for record in records[1:] if "d" in granted(record)]


def _spike_lines() -> list[str]:
    columns = zip(spike(0), spike(32), strict=True)
    rows = [[step, *columns_] for step, columns_ in enumerate(columns, 1)][:_SHOWN_STEPS]
    return [
        "### The delay that a long prompt causes for a decoding request",
        "",
        "d decodes, one token a step, when p arrives with 256 tokens. The duration of a step"
        " grows with its tokens, and d's next token waits for the whole step: once, for 257 tokens"
        " instead of 1. A threshold of 32 spreads p over eight steps of 33. The longest gap of d"
        " becomes about eight times shorter, and p's first token arrives seven steps later.",
        "",
        *_table(["step", "tokens, no threshold", "tokens, threshold 32"], rows),
    ]


CUTS: dict[str, dict[str, Any]] = {
    "2,048 tokens a step": {},
    "64 tokens a step": {"max_num_batched_tokens": 64},
    "16 tokens a step": {"max_num_batched_tokens": 16},
    "threshold 20": {"long_prefill_token_threshold": 20},
    "14 blocks": {"num_gpu_blocks_override": 15, "max_model_len": 160},
}


def run_null_model(**settings: Any) -> tuple[list[list[int]], int, int]:
    """Three prompts on the null model.

    Returns:
        The outputs of each prompt, the number of steps, and the number of preemptions.
    """
    settings = {"model": "null", "max_num_seqs": 16, "enable_prefix_caching": False} | settings
    engine = InprocEngine(configure(**settings))
    prompts = [prompt_stream(name, length) for name, length in (("a", 120), ("b", 30), ("c", 50))]
    outputs: dict[int, list[int]] = {}
    for output in engine.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True)):
        outputs.setdefault(output.request_id, []).extend(output.token_ids)
    stats = engine.stats()
    return [outputs[key] for key in sorted(outputs)], stats.num_steps, stats.num_preemptions


def _chunk_lines() -> list[str]:
    rows = []
    expected, _, _ = run_null_model()
    for name, settings in CUTS.items():
        outputs, num_steps, num_preemptions = run_null_model(**settings)
        same = "equal" if outputs == expected else "DIFFERENT"
        rows.append([name, num_steps, num_preemptions, sum(map(len, outputs)), same])
    return [
        "### Chunking changes when tokens are computed, never which",
        "",
        "Three prompts of 120, 30 and 50 tokens, 24 outputs each, on the null model, whose next"
        " token depends only on the context.",
        "",
        *_table(["limited by", "steps", "preemptions", "tokens", "outputs"], rows),
    ]


def tables() -> Iterator[str]:
    """All sections, in the order of the page."""
    for lab in STEP_LABS:
        yield from [*lab.lines(), ""]
    yield from [*_chunk_lines(), ""]
    yield from [*_prefix_cache_lines(), ""]
    yield from _spike_lines()


def main() -> int:
    """Print the tables; returns the exit status."""
    print("\n".join(tables()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
