"""The evaluation harness `lm-eval`, through `local-completions` and `local-chat-completions`.

The project's own interpreter computes the log-likelihoods that transformers gives.
"""

import json
import os
import subprocess
from pathlib import Path

from checks import DIRECTORY, MODEL, MODEL_DIRECTORY, URL, check, main, run_tool

MAX_DIFFERENCE = 1e-3
ROWS = [
    {"prompt": "def add(a, b):\n    return", "choices": [" a + b", " None", " xyzzy"], "answer": 0},
    {"prompt": "import", "choices": [" os\n", " sys, os", " def"], "answer": 0},
    {"prompt": "class A:\n    def __init__(self", "choices": ["):", ", other):"], "answer": 0},
    {"prompt": "for i in", "choices": [" range(10):", " 7"], "answer": 0},
]
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
num_fewshot: 0
doc_to_text: "{{{{prompt}}}}"
metadata:
  version: 1
"""
CHOICES = """task: troika_choices
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""
GENERATION = """task: troika_generation
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 12
  do_sample: false
metric_list:
  - metric: exact_match
"""
BACKEND = {False: ",tokenizer_backend=remote", True: ""}


def evaluate(task: str, text: str, batch_size: int, *, chats: bool = False) -> list[dict]:
    """Run one task, and return its samples."""
    data = DIRECTORY / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (DIRECTORY / f"{task}.yaml").write_text(text + COMMON.format(data=data))
    kind = "chat-completions" if chats else "completions"
    output = DIRECTORY / f"{task}-{batch_size}-{kind}"
    route = kind.replace("chat-", "chat/")
    model = f"model={MODEL},base_url={URL}/v1/{route}"
    run_tool(
        *("lm_eval", "--model", f"local-{kind}", "--tasks", task),
        *(("--apply_chat_template",) if chats else ()),
        *("--model_args", f"{model}{BACKEND[chats]},num_concurrent=2,max_retries=1,max_length=512"),
        *("--include_path", str(DIRECTORY), "--output_path", str(output), "--log_samples"),
        *("--batch_size", str(batch_size)),
        HF_HOME=str(DIRECTORY / "hf"),
    )
    [path] = Path(output).rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(samples, key=lambda sample: sample["doc_id"])


def reference() -> list[list[float]]:
    """Return the log-likelihoods of all choices as transformers computes them."""
    program = Path(__file__).with_name("reference_loglikelihoods.py")
    done = subprocess.run(
        [os.environ["TROIKA_PYTHON"], str(program), str(MODEL_DIRECTORY)],
        input=json.dumps(ROWS),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(done.stdout)


@check
def loglikelihoods_equal_those_of_transformers() -> None:
    expected = reference()
    for batch_size in (1, 4):
        samples = evaluate("troika_choices", CHOICES, batch_size)
        assert len(samples) == len(ROWS)
        for sample, row in zip(samples, expected, strict=True):
            got = [float(response[0][0]) for response in sample["resps"]]
            largest = max(abs(a - b) for a, b in zip(got, row, strict=True))
            assert largest < MAX_DIFFERENCE, (got, row)


@check
def generate_until() -> None:
    samples = evaluate("troika_generation", GENERATION, 1)
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples)
    assert any(sample["resps"][0][0] for sample in samples)


@check
def generate_until_in_chats() -> None:
    samples = evaluate("troika_generation", GENERATION, 1, chats=True)
    assert any(sample["resps"][0][0] for sample in samples)


if __name__ == "__main__":
    main()
