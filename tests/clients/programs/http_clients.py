"""Clients of HTTP without a library for the API: aiohttp, httpx and curl, which read the events."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import aiohttp
import httpx
from checks import MODEL, URL, check, main, run_tool

CHATS = URL + "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
BODY: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 12, "temperature": 0}
STREAM = {**BODY, "stream": True}
TIMEOUT_S = 60.0


def whole() -> str:
    answer = httpx.post(CHATS, json=BODY, timeout=TIMEOUT_S).json()
    return str(answer["choices"][0]["message"]["content"])


def text_of(lines: Iterable[str]) -> str:
    """Return the text of a stream's lines, which must end with its end mark."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    return "".join(
        chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]
    )


@check
def httpx_stream() -> None:
    with httpx.stream("POST", CHATS, json=STREAM, timeout=TIMEOUT_S) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert text_of(response.iter_lines()) == whole()


@check
def httpx_reuses_a_connection() -> None:
    with httpx.Client(timeout=TIMEOUT_S) as client:
        for _ in range(3):
            assert client.post(CHATS, json={**BODY, "n": 0}).status_code == 400
            assert client.post(CHATS, json=BODY).status_code == 200
            with client.stream("POST", CHATS, json=STREAM) as response:
                assert text_of(response.iter_lines()) == whole()


@check
def aiohttp_stream() -> None:
    async def read() -> str:
        async with aiohttp.ClientSession() as session, session.post(CHATS, json=STREAM) as response:
            return text_of([line.decode().rstrip("\n") async for line in response.content])

    assert asyncio.run(read()) == whole()


@check
def aiohttp_many_streams() -> None:
    async def read(session: aiohttp.ClientSession) -> str:
        async with session.post(CHATS, json=STREAM) as response:
            return text_of([line.decode().rstrip("\n") async for line in response.content])

    async def read_all() -> list[str]:
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(read(session) for _ in range(20)))

    assert set(asyncio.run(read_all())) == {whole()}


@check
def aiohttp_chunked_body() -> None:
    """A body of unknown length, as a client that streams its own input sends it."""

    async def pieces() -> Any:
        data = json.dumps(BODY).encode()
        for start in range(0, len(data), 20):
            yield data[start : start + 20]

    async def read() -> str:
        headers = {"content-type": "application/json"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(CHATS, data=pieces(), headers=headers) as response,
        ):
            return str((await response.json())["choices"][0]["message"]["content"])

    assert asyncio.run(read()) == whole()


def curl(*arguments: str) -> str:
    return run_tool("curl", "--silent", "--show-error", "--max-time", "60", *arguments)


@check
def curl_stream() -> None:
    output = curl("--no-buffer", CHATS, "--json", json.dumps(STREAM))
    assert text_of(output.splitlines()) == whole()


@check
def curl_form_of_a_body() -> None:
    """`-d` without a header names another type; the body is JSON nevertheless."""
    assert json.loads(curl(CHATS, "-d", json.dumps(BODY)))["choices"]


@check
def curl_expect_continue() -> None:
    body = json.dumps({**BODY, "messages": [{"role": "user", "content": "Hello " * 200}]})
    output = curl(CHATS, "-H", "Expect: 100-continue", "--json", body)
    assert json.loads(output)["choices"]


@check
def curl_errors() -> None:
    written = ("--write-out", "\n%{http_code}")
    for arguments, status in (
        ((CHATS, "--json", "{"), "400"),
        ((CHATS, "-X", "GET"), "405"),
        ((URL + "/v1/none", "--json", "{}"), "404"),
        ((CHATS, "--json", json.dumps({**BODY, "temperature": 9})), "400"),
    ):
        body, _, code = curl(*written, *arguments).rpartition("\n")
        assert code == status
        assert json.loads(body)["error"]["message"]


if __name__ == "__main__":
    main()
