"""The command `llm`, with the server as one of its OpenAI-compatible models."""

import json

from checks import DIRECTORY, MODEL, URL, check, main, run_tool

CONFIG = f"""
- model_id: troika
  model_name: {MODEL}
  api_base: {URL}/v1
  supports_schema: true
  supports_tools: true
"""
OPTIONS = ("-m", "troika", "-o", "temperature", "0", "-o", "max_tokens")


def run_llm(*arguments: str) -> str:
    (DIRECTORY / "extra-openai-models.yaml").write_text(CONFIG)
    return run_tool("llm", *arguments, LLM_USER_PATH=str(DIRECTORY))


@check
def models() -> None:
    assert "troika" in run_llm("models")


@check
def prompt() -> None:
    streamed = run_llm("Hello", *OPTIONS, "12")
    whole = run_llm("Hello", *OPTIONS, "12", "--no-stream")
    assert streamed.strip() == whole.strip() != ""


@check
def conversation() -> None:
    assert run_llm("More", "--continue", *OPTIONS, "12").strip()


@check
def schema() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["red", "green"]}},
        "required": ["name"],
    }
    for extra in ([], ["--no-stream"]):
        answer = run_llm("Hello", *OPTIONS, "300", "--schema", json.dumps(schema), *extra)
        assert json.loads(answer)["name"] in ("red", "green")


@check
def tools() -> None:
    """Tools in the request; the model is free to answer without them."""
    source = 'def weather(city: str) -> str:\n    """The weather."""\n    return "sunny"\n'
    assert run_llm("Hello", *OPTIONS, "12", "--functions", source).strip()


if __name__ == "__main__":
    main()
