"""A LangGraph agent, which calls a tool and answers with its result, and its streams."""

import json
from typing import Any

from checks import URL, check, main
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

QUESTION: Any = {"messages": [("user", "How is the weather in Grimsel?")]}


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    assert city == "Grimsel", city
    return json.dumps({"temperature": 21, "condition": "sunny"})


def agent(**options: Any) -> Any:
    model = ChatOpenAI(
        model="demo-chat",
        base_url=URL + "/v1",
        api_key="none",  # type: ignore[arg-type]
        temperature=0,
        max_retries=0,
        max_tokens=200,  # type: ignore[call-arg]
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    ).bind_tools([get_weather])

    def ask(state: MessagesState) -> Any:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode([get_weather]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile(**options)


@check
def invoke() -> None:
    messages = agent().invoke(QUESTION)["messages"]
    assert [type(message) for message in messages[1:]] == [AIMessage, ToolMessage, AIMessage]
    assert messages[1].tool_calls[0]["args"] == {"city": "Grimsel"}
    assert messages[-1].content == "It is 21 degrees and sunny in Grimsel."


@check
def stream_of_messages() -> None:
    pieces = [piece for piece, _ in agent().stream(QUESTION, stream_mode="messages")]
    calls = [call for p in pieces for call in getattr(p, "tool_call_chunks", [])]
    assert "".join(call["args"] or "" for call in calls) == '{"city": "Grimsel"}'
    chunks = [piece for piece in pieces if isinstance(piece, AIMessageChunk)]
    assert len(chunks) > 4
    assert "".join(str(c.content) for c in chunks) == "It is 21 degrees and sunny in Grimsel."


@check
def memory() -> None:
    """The second question goes to the same conversation."""
    asked = agent(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    asked.invoke(QUESTION, config)
    answer = asked.invoke({"messages": [("user", "Hello!")]}, config)
    assert len(answer["messages"]) == 6


if __name__ == "__main__":
    main()
