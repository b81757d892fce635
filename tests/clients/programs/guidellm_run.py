"""The load generator GuideLLM, with prompts that it makes from the model's vocabulary."""

import json

from checks import DIRECTORY, MODEL, MODEL_DIRECTORY, URL, check, main, run_tool

NUM_REQUESTS = 12
NUM_STREAMS = 4
BACKEND = f"kind=openai_http,target={URL},model={MODEL}"


def benchmark(request_format: str) -> None:
    output = DIRECTORY / request_format.strip("/").replace("/", "-")
    run_tool(
        *("guidellm", "run"),
        *("--backend", f"{BACKEND},request_format={request_format}"),
        *("--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=12"),
        *("--tokenizer", f"kind=huggingface_auto,model={MODEL_DIRECTORY}"),
        *("--profile", f"kind=concurrent,streams={NUM_STREAMS}"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--output", f"kind=json,path={output}.json", "--disable-console-interactive"),
    )
    report = json.loads(output.with_suffix(".json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    # At its end it may cut off requests that are still open, at most one a stream.
    assert totals["errored"] == 0, totals
    assert totals["successful"] >= NUM_REQUESTS - NUM_STREAMS, totals


@check
def chats() -> None:
    benchmark("/v1/chat/completions")


@check
def completions() -> None:
    benchmark("/v1/completions")


if __name__ == "__main__":
    main()
