"""DSPy: its model by itself and in programs."""

import asyncio
import json
from typing import Any

import dspy
from checks import MODEL, URL, check, error_of, main
from dspy.utils.exceptions import LMInvalidRequestError

OPTIONS: Any = {"api_base": URL + "/v1", "api_key": "none", "cache": False, "num_retries": 0}
COLOUR = {"enum": ["red", "green"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}


def model(**options: Any) -> dspy.LM:
    settings = {"temperature": 0.0, "max_tokens": 300} | OPTIONS | options
    return dspy.LM(f"hosted_vllm/{MODEL}", **settings)


class Chat(dspy.Module):
    """A program that asks the model, which is too small for DSPy's own formats."""

    def forward(self, question: str) -> Any:
        [text] = dspy.settings.lm(question)
        return dspy.Prediction(text=text)


@check
def calls() -> None:
    [text] = model(max_tokens=12)("Hello")
    assert text
    [other] = dspy.LM(f"text-completion-openai/{MODEL}", model_type="text", **OPTIONS)("a = ")
    assert other


@check
def programs() -> None:
    with dspy.context(lm=model(max_tokens=12)):
        examples = [dspy.Example(question=f"Hello {i}").with_inputs("question") for i in range(4)]
        answers = Chat().batch(examples, disable_progress_bar=True)
    assert all(answer.text for answer in answers)


@check
def response_format() -> None:
    [text] = model()("Hello", response_format=FORMAT)
    assert json.loads(text) in ("red", "green")


@check
def asynchronous() -> None:
    async def ask() -> Any:
        return await asyncio.gather(*(model(max_tokens=12).acall("Hello") for _ in range(4)))

    answers = asyncio.run(ask())
    assert len({answer[0] for answer in answers}) == 1


@check
def embeddings() -> None:
    embedder = dspy.Embedder(f"openai/{MODEL}", api_base=URL + "/v1", api_key="none", caching=False)
    assert len(embedder(["a text", "another"])) == 2


@check
def errors() -> None:
    error = error_of(LMInvalidRequestError, model(temperature=9.0), prompt="Hello")
    assert "temperature" in str(error)


if __name__ == "__main__":
    main()
