"""Long arrays and whole answers are encoded in pieces, so that other threads run in between."""

import itertools
import json
from collections.abc import Callable

import httpx
import msgspec
import pytest

from api_proc.http.pieces import PIECE_BYTES, divided
from api_proc.openai import encoded_list, reply
from api_proc.openai.encoded_list import EncodedList, EncodedLists
from api_proc.responses import output as response_output
from api_proc.responses import reply as response_reply
from tests.api.conftest import MakeServer
from tests.api.fake_engine import FACTS, FakeClient, emitting, ids_of

PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


@pytest.mark.parametrize("number", [0, 1, 63, 64, 65, 200])
def test_the_slices_are_the_array(number: int) -> None:
    items: list[object] = [{"a,]": [i, None]} for i in range(number)]
    lists = EncodedLists()
    arrays = [EncodedList(lists), EncodedList(lists, 50)]
    for array in arrays:
        for item in items:
            array.append(item)
    whole = {"first": arrays[0].json(), "text": "\x00,1\x00", "second": arrays[1].json()}
    expected = {"first": items, "text": "\x00,1\x00", "second": items}
    pieces = lists.encoded(whole)
    assert msgspec.json.decode(b"".join(pieces)) == expected
    assert (len(pieces) > 1) == (number >= 50)
    assert lists.encoded({"next": [1]}) == [b'{"next":[1]}']


def test_a_kept_array_belongs_to_several_objects() -> None:
    lists = EncodedLists(is_kept=True)
    first, second = lists.add([b"[1", b"]"]), lists.add([b"[2]"])
    for _ in range(2):
        assert lists.encoded([second, first]) == [b"[", b"[2]", b",", b"[1", b"]", b"]"]


@pytest.mark.parametrize(
    "sizes", [[], [1], [10, PIECE_BYTES, 1], [1] * 9, [50_000, 20_000, 1], [300_000, 5, 70_000]]
)
def test_pieces_of_bounded_size_are_written(sizes: list[int]) -> None:
    """Small ones are written together."""
    pieces = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    written = list(divided(pieces))
    assert b"".join(written) == b"".join(pieces)
    assert all(len(piece) <= PIECE_BYTES for piece in written)
    pairs = itertools.pairwise(written)
    assert all(len(first) + len(second) > PIECE_BYTES for first, second in pairs)


@pytest.mark.parametrize("path", PATHS)
def test_no_call_of_the_encoder_takes_a_large_part_of_an_answer(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Its objects, not the bytes that it copies, take the time."""
    facts = msgspec.structs.replace(FACTS, max_model_len=2**14, num_gpu_blocks=2**13)
    live = make_server(FakeClient(facts, emitting(ids_of("x") * 2000, per_output=50)))
    encoded: list[int] = []

    def observed(encode: Callable[[object], bytes]) -> Callable[[object], bytes]:
        def note(value: object) -> bytes:
            content = encode(value)
            encoded.append(len(content) - sum(map(len, _raws(value))))
            return content

        return note

    for module in (encoded_list, reply, response_output, response_reply):
        monkeypatch.setattr(module, "encode", observed(msgspec.json.encode))
    fields: dict[str, object] = {
        "prompt": "x",
        "logprobs": 20,
        "n": 3,
        "max_tokens": 1000,
        "return_tokens_as_token_ids": True,
    }
    if "chat" in path:
        message = {"role": "user", "content": "x"}
        fields |= {"messages": [message], "logprobs": True, "top_logprobs": 20}
    elif "inference" in path:
        params = {"logprobs": 20, "n": 3, "max_tokens": 1000}
        fields = {"token_ids": [5, 6], "sampling_params": params}
    answer = httpx.post(live.url + path, json=fields, timeout=60)
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len(answer.content) > 10**6
    assert max(encoded) < len(answer.content) / 20


@pytest.mark.parametrize("stream", [False, True])
def test_no_call_of_the_encoder_takes_a_large_part_of_a_response(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Each of the four last events of a stream has all log-probabilities, as has a stored one."""
    facts = msgspec.structs.replace(FACTS, max_model_len=2**14, num_gpu_blocks=2**13)
    live = make_server(FakeClient(facts, emitting(ids_of("x") * 500, per_output=50)))
    encoded: list[int] = []

    def observed(value: object) -> bytes:
        content = msgspec.json.encode(value)
        encoded.append(len(content))
        return content

    for module in (encoded_list, response_output, response_reply):
        monkeypatch.setattr(module, "encode", observed)
    body = {
        "input": "x",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 20,
        "max_output_tokens": 500,
        "stream": stream,
    }
    answer = httpx.post(live.url + "/v1/responses", json=body, timeout=60)
    assert len(answer.content) > 200_000
    assert max(encoded) < 60_000
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:1] == "d"]
        response = events[-1]["response"]
        deltas = [event["logprobs"] for event in events if event["type"].endswith("text.delta")]
        [part] = response["output"][0]["content"]
        assert part["logprobs"] == list(itertools.chain(*deltas))
        assert [events[-4]["logprobs"], events[-3]["part"]] == [part["logprobs"], part]
        assert events[-2]["item"] == response["output"][0]
    else:
        response = answer.json()
    assert len(response["output"][0]["content"][0]["logprobs"]) == 500
    stored = httpx.get(f"{live.url}/v1/responses/{response['id']}")
    assert stored.json() == response


def _raws(value: object) -> list[bytes]:
    """Return the parts of a choice that were encoded before."""
    logprobs = getattr(value, "logprobs", None)
    found = (getattr(logprobs, name, b"") for name in ("content", "top_logprobs"))
    return [bytes(part) for part in found]
