"""Print the log-likelihoods of choices after their prompts, computed by transformers alone.

`PYTHON reference_loglikelihoods.py MODEL` reads rows with `prompt` and `choices` as JSON.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    rows = []
    for row in json.load(sys.stdin):
        context = tokenizer(row["prompt"], add_special_tokens=False).input_ids
        values = []
        for choice in row["choices"]:
            ids = tokenizer(row["prompt"] + choice, add_special_tokens=False).input_ids
            with torch.inference_mode():
                scores = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)
            positions = range(len(context), len(ids))
            values.append(sum(scores[at - 1, ids[at]].item() for at in positions))
        rows.append(values)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
