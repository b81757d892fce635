"""The data that trains the demo-chat model: as the engine renders it, and two splits."""

import json
from pathlib import Path
from random import Random

from api_proc.chat.families import find_dialect
from api_proc.chat.parser import OutputParser
from api_proc.openai.chat_message import assistant_message
from api_proc.text.chat_template import ChatTemplate
from tests.tools.demo_chat.conversations import call_conversation, conversation
from tests.tools.demo_chat.samples import END, SampleMaker
from tests.tools.demo_chat.values import Values

SOURCE = Path(__file__).parents[2] / "scripts" / "demo_chat_model" / "chat_template.jinja"
TEMPLATE = ChatTemplate(SOURCE.read_text(encoding="utf-8"), {})


def test_a_sample_is_a_prompt_of_the_engine_and_an_answer_that_its_parser_reads() -> None:
    values, maker = Values(Random(1), is_held_out=False), SampleMaker(TEMPLATE)
    for number in range(60):
        thinks = number % 2 == 0
        chat = call_conversation(values, is_open=number % 3 == 0, is_thinking=thinks)
        *before, wanted = chat.messages
        given, learnt = maker.pieces(chat)
        extra = {} if thinks else {"enable_thinking": False}
        assert given.text == TEMPLATE.render(before, tools=chat.tools, extra=extra)
        assert (given.is_learnt, learnt.is_learnt) == (False, True)
        parser = OutputParser(
            find_dialect(TEMPLATE.source, "auto", "auto"),
            schemas={},
            is_reasoning_open=False,
            make_id=str,
        )
        answer = learnt.text.removesuffix(END)
        message = assistant_message(parser.push(answer, is_last=True))
        assert (message.reasoning_content or None) == wanted.get("reasoning_content")
        calls = [
            (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
        ]
        functions = [call["function"] for call in wanted["tool_calls"]]
        assert calls == [(function["name"], function["arguments"]) for function in functions]


def test_everything_that_the_assistant_writes_is_learnt() -> None:
    """The start of earlier messages is not, nor calls in a text with another prompt."""
    values, maker = Values(Random(2), is_held_out=False), SampleMaker(TEMPLATE)
    for _ in range(60):
        chat = conversation(values, long_rate=0.5)
        pieces = maker.pieces(chat)
        written = [m for m in chat.messages if m["role"] == "assistant"]
        assert sum(piece.is_learnt for piece in pieces) == len(written)
        assert all(piece.text.endswith(END) for piece in pieces if piece.is_learnt)
        assert pieces[-1].text.startswith("<think>") == chat.is_thinking


def test_no_value_is_in_two_splits() -> None:
    def names(*, is_held_out: bool) -> set[str]:
        values = Values(Random(3), is_held_out=is_held_out)
        kinds = (values.city, values.person, values.item, values.word)
        return {kind() for _ in range(500) for kind in kinds}

    assert names(is_held_out=True).isdisjoint(names(is_held_out=False))
