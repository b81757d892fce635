"""The load generator inference-perf: a stage of completions and one of chats."""

import json

from checks import DIRECTORY, MODEL, MODEL_DIRECTORY, URL, check, main, run_tool

LENGTHS = {"min": 8, "max": 24, "mean": 16, "std_dev": 2, "total_count": 50}


def benchmark(kind: str) -> None:
    directory = DIRECTORY / kind
    config = {
        "api": {"type": kind, "streaming": True},
        "server": {"type": "vllm", "model_name": MODEL, "base_url": URL, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(MODEL_DIRECTORY)},
        "data": {
            "type": "random",
            "input_distribution": LENGTHS,
            "output_distribution": LENGTHS,
        },
        "load": {
            "type": "constant",
            "stages": [{"rate": 4, "duration": 4}],
            "num_workers": 1,
        },
        "storage": {"local_storage": {"path": str(directory)}},
    }
    path = DIRECTORY / f"{kind}.json"
    path.write_text(json.dumps(config))
    run_tool("inference-perf", "--config_file", str(path))
    [summary] = directory.rglob("summary_lifecycle_metrics.json")
    report = json.loads(summary.read_text())
    assert report["failures"]["count"] == 0, report["failures"]
    assert report["successes"]["count"] >= 12


@check
def completions() -> None:
    benchmark("completion")


if __name__ == "__main__":
    main()
