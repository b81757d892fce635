"""Whole conversations: a system prompt, tools, earlier exchanges, and a task at the end."""

from dataclasses import dataclass
from typing import Any

from tests.tools.demo_chat.known_tools import known_task, weather_of_two
from tests.tools.demo_chat.open_tools import open_task
from tests.tools.demo_chat.plain_chats import plain_task, repeat
from tests.tools.demo_chat.tasks import Call, Schema, Task, closed, generated, name_of
from tests.tools.demo_chat.values import Values

Message = dict[str, Any]

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are an assistant with tools.",
    "Be polite and brief.",
    "You are a friendly assistant. Use the tools if they help.",
)
NO_TOOL = "I have no tool for that."


@dataclass(frozen=True)
class Conversation:
    """Messages that end with an assistant's."""

    messages: list[Message]
    tools: list[Schema]
    is_thinking: bool
    keeps_reasoning: bool
    """Clients may return the reasoning of a call together with its result."""


def conversation(
    values: Values, *, repeat_rate: float = 0.0, long_rate: float = 0.1
) -> Conversation:
    """Draw a conversation; `repeat_rate` is the share of texts to repeat, which teach copying."""
    if values.chance(repeat_rate):
        return _assembled(values, repeat(values), [], 0)
    is_long = values.chance(long_rate)
    num_before = values.number(1, 4) if is_long else values.pick((0, 0, 0, 0, 1, 1, 2))
    num_others = values.number(1, 6) if is_long else values.pick((0, 0, 1, 1, 2, 3))
    kind = values.random.random()
    if kind < 0.36:
        task = known_task(values)
    elif kind < 0.66:
        task = open_task(values)
    elif kind < 0.70:
        task = weather_of_two(values)
    elif kind < 0.75:
        return _without_tool(values, num_others)
    else:
        task = plain_task(values)
        num_others = num_others if values.chance(0.4) else 0
    others = distractors(values, task, num_others)
    return _assembled(values, task, others, num_before)


def call_conversation(values: Values, *, is_open: bool, is_thinking: bool) -> Conversation:
    """Draw a conversation that ends with a call, for measurements."""
    task = open_task(values) if is_open else known_task(values)
    others = distractors(values, task, values.number(0, 3))
    tools = _shuffled(values, task.tools + others)
    messages = [{"role": "user", "content": task.question}, _calling(task.calls, is_thinking)]
    return Conversation(messages, tools, is_thinking, True)


def answer_conversation(values: Values) -> Conversation:
    """Draw a conversation that ends with the answer to a result, for measurements."""
    task = values.pick((known_task, open_task))(values)
    tools = _shuffled(values, task.tools + distractors(values, task, values.number(0, 3)))
    is_thinking = values.chance(0.5)
    return Conversation(_exchange(task, is_thinking), tools, is_thinking, values.chance(0.5))


def chat_conversation(values: Values) -> Conversation:
    """Draw a conversation without tools, for measurements."""
    return _assembled(values, plain_task(values), [], 0)


def distractors(values: Values, task: Task, count: int) -> list[Schema]:
    """Return tools for other topics, with different names."""
    topics = {task.topic, "arithmetic"}
    names = set(map(name_of, task.tools))
    tools: list[Schema] = []
    for _ in range(count):
        other = known_task(values) if values.chance(0.4) else open_task(values)
        [tool] = other.tools
        if other.topic not in topics and name_of(tool) not in names:
            tools.append(tool)
            topics.add(other.topic)
            names.add(name_of(tool))
    return tools


def _shuffled(values: Values, tools: list[Schema]) -> list[Schema]:
    """Return the tools in any order, all written in the same style."""
    style = values.pick((None,) * 8 + (generated, closed))
    result = tools if style is None else [style(tool) for tool in tools]
    return values.random.sample(result, len(result))


def _without_tool(values: Values, num_others: int) -> Conversation:
    """Return a conversation in which the tool for the question is missing."""
    task = open_task(values) if values.chance(0.4) else known_task(values)
    while task.topic == "arithmetic":  # the model may know the sum
        task = known_task(values)
    others = distractors(values, task, num_others)
    return _assembled(values, Task(task.question, [], [], NO_TOOL, "No tool fits."), others, 0)


def _assembled(values: Values, task: Task, others: list[Schema], num_before: int) -> Conversation:
    is_thinking = values.chance(0.6)
    messages: list[Message] = []
    if values.chance(0.35):
        prompt = values.pick(SYSTEM_PROMPTS) if values.chance(0.7) else _other_prompt(values)
        messages.append({"role": "system", "content": prompt})
    tools = task.tools + others
    for _ in range(num_before):
        before = values.pick((plain_task, known_task, open_task))(values)
        names = set(map(name_of, tools))
        if before.topic == task.topic or not names.isdisjoint(map(name_of, before.tools)):
            continue
        tools = tools + before.tools
        messages += [*before.history, *_exchange(before, is_thinking)]
    exchange = _exchange(task, is_thinking)
    if task.calls and values.chance(0.55):
        exchange = exchange[:2]
    messages += [*task.history, *exchange]
    return Conversation(messages, _shuffled(values, tools), is_thinking, values.chance(0.5))


def _other_prompt(values: Values) -> str:
    return f"{values.words(values.number(3, 15)).capitalize()}."


def _exchange(task: Task, is_thinking: bool) -> list[Message]:
    """Return a question, the calls with their results, and the answer."""
    messages: list[Message] = [{"role": "user", "content": task.question}]
    thought = task.thought
    if task.calls:
        thought = "I have the result." if len(task.calls) == 1 else "I have the results."
        messages.append(_calling(task.calls, is_thinking))
        for index, call in enumerate(task.calls):
            identity = {"name": call.name, "tool_call_id": f"call_{index}"}
            messages.append({"role": "tool", "content": call.result, **identity})
    answer: Message = {"role": "assistant", "content": task.answer}
    return [*messages, answer | ({"reasoning_content": thought} if is_thinking else {})]


def _calling(calls: list[Call], is_thinking: bool) -> Message:
    listed = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]
    message: Message = {"role": "assistant", "content": "", "tool_calls": listed}
    if is_thinking:
        described = ", then ".join(call.description for call in calls)
        message["reasoning_content"] = f"I call {described}."
    return message
