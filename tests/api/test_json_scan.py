"""The scan of a body: exact names, bounded values, and decoding in slices changes nothing."""

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from api_proc.bodies import ChatBody, CompletionBody
from api_proc.errors import ApiError
from api_proc.generation.messages import CalledFunction
from api_proc.http import json_body, json_scan
from api_proc.http.json_body import BodyDecoder, LargeRequests, Turn
from tests.timing import within

decode = BodyDecoder(CompletionBody)
decode_chat = BodyDecoder(ChatBody)

TEXTS = st.text(st.sampled_from('a\\"[]{}:,é🙂\n0'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 99) | st.floats(0, 1) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def scanned(raw: bytes) -> json_scan.JsonScan:
    scan = json_scan.JsonScan(raw, frozenset({b"prompt"}))
    for _ in scan.steps():
        pass
    return scan


def error_of(raw: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode(raw)
    return caught.value


@given(st.dictionaries(TEXTS, VALUES, max_size=4), st.booleans())
def test_names_of_any_object_are_found(value: dict[str, Any], ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=ascii_only or None).encode()
    assert [name.decode() for name in scanned(raw).names] == list(value)


@given(VALUES, st.text(st.sampled_from('ab\\"-:'), min_size=1, max_size=4))
def test_a_name_that_occurs_twice_is_found_however_it_is_written(value: Any, name: str) -> None:
    inner = json.dumps(value)
    escaped = "".join(f"\\u{ord(character):04x}" for character in name)
    for second in (json.dumps(name), f'"{escaped}"'):
        twice = f"{{{json.dumps(name)}: {inner}, {second}: 1}}"
        for raw in (twice, f'{{"x": [{inner}, {twice}]}}'):
            with pytest.raises(ApiError) as caught:
                scanned(raw.encode())
            assert (caught.value.code, caught.value.param) == ("duplicate_name", name)


@given(VALUES)
def test_values_are_counted(value: Any) -> None:
    def count(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(1 + count(item) for item in value.values())
        if isinstance(value, list):
            return 1 + sum(map(count, value))
        return 1

    scan = scanned(json.dumps([value]).encode())
    # Of numbers and literals only the commas after them are counted.
    assert count([value]) / 2 <= scan.num_values <= 2 * count([value])


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 2**31 - 1), max_size=9)
    | st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), min_size=1, max_size=5)
    | st.lists(st.lists(st.integers(0, 9), max_size=3) | st.text(max_size=2), max_size=4)
    | st.lists(st.integers(2**31 - 2, 2**31 + 1), max_size=4)
)
def test_ids_in_pieces_are_those_of_the_whole(prompt: Any) -> None:
    """Values and errors are the same with pieces of a few bytes; a route rejects mixtures."""
    assume(len(set(map(type, prompt))) <= 1)
    raw = json.dumps({"stop": "[1]", "prompt": prompt, "max_tokens": 5}).encode()
    results = []
    for inline, piece in ((10**9, 2**15), (0, 3)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_body, "_INLINE_IDS", inline)
            patch.setattr(json_body, "_PIECE_BYTES", piece)
            try:
                body = decode(raw)
                results.append((body.prompt, body.max_tokens, body.stop))
            except ApiError as error:
                results.append((error.param, error.code, None))
    assert results[0] == results[1]


@pytest.mark.parametrize("ids", [b"[1,2,]", b"[,1]", b"[1,,2]", b"[1 2]", b"[[1,2,],[3]]", b"[01]"])
def test_pieces_of_invalid_json_are_rejected(monkeypatch: pytest.MonkeyPatch, ids: bytes) -> None:
    monkeypatch.setattr(json_body, "_INLINE_IDS", 0)
    monkeypatch.setattr(json_body, "_PIECE_BYTES", 1)
    assert error_of(b'{"prompt": %b}' % ids).code == "invalid_json"


def test_numbers_of_values_and_depths_are_bounded_except_in_lists_of_ids() -> None:
    values = json_scan.MAX_VALUES
    assert error_of(b'{"prompt": "x", "a": [%b0]}' % (b"0," * values)).code == "too_many_values"
    assert error_of(b'{"prompt": ["x"%b]}' % (b",1" * values)).code == "too_many_values"
    assert error_of(b'{"prompt": [%b[1]]}' % (b"[1]," * values)).code == "too_many_values"
    depth = json_scan.MAX_DEPTH - 1
    nested = b'{"prompt": "x", "a": ' + b"[" * depth + b"]" * depth + b"}"
    assert decode(nested).prompt == "x"
    assert error_of(nested.replace(b"[]", b"[[]]")).code == "too_deep"
    assert decode(b'{"prompt": [%b1]}' % (b"1," * 10**6)).prompt == [1] * (10**6 + 1)


SIZE = 4 * 2**20 - 300
BODIES = {
    "ids": b'{"prompt":[%b1]}' % (b"1," * (SIZE // 2)),
    "lists of ids": b'{"prompt":[%b]}' % b",".join([b"[1%b]" % (b",1" * 1000)] * (SIZE // 2003)),
    "text": b'{"prompt":"%b"}' % (b"a" * SIZE),
    "escapes": b'{"prompt":"%b"}' % (b"\\n" * (SIZE // 2)),
    "escaped quotes": b'{"prompt":"%b"}' % (b'\\"' * (SIZE // 2)),
    "an open string": b'{"prompt":"%b' % (b'\\"' * (SIZE // 2)),
    "quotes": b'"' * SIZE,
    "objects": b'{"prompt":"x","a":[%b{}]}' % (b"{}," * (SIZE // 3)),
    "names": b'{"prompt":"x","a":{%b}}' % b",".join(b'"%07d":1' % i for i in range(SIZE // 11)),
}


@pytest.mark.parametrize("name", BODIES)
def test_every_slice_is_short(name: str) -> None:
    """This holds for any body of 4 MiB; decoding as a whole takes up to ten times as long."""

    def measure() -> dict[str, float]:
        longest = 0.0
        steps = decode._begin(BODIES[name]).steps()
        while True:
            began = time.thread_time()
            try:
                ended = next(steps, steps) is steps
            except ApiError:
                ended = True
            longest = max(longest, time.thread_time() - began)
            if ended:
                return {"slice_s": longest}

    within(5, measure, slice_s=0.025)


def test_one_large_body_is_decoded_at_a_time() -> None:
    """Small bodies do not wait for it."""

    async def run() -> list[str]:
        requests = LargeRequests(1)
        order: list[str] = []

        async def read(name: str, raw: bytes) -> None:
            with Turn(requests) as turn:
                await decode.in_slices(raw, turn)
                order.append(name)
                if len(raw) > 1000:
                    await asyncio.sleep(0.01)
                    order.append(name)

        large = b'{"prompt":[%b1]}' % (b"1," * 10**5)
        await asyncio.gather(read("a", large), read("b", large), read("small", b'{"prompt":"x"}'))
        assert not requests.working.is_full()
        return order

    assert asyncio.run(run()) == ["small", "a", "a", "b", "b"]


def test_a_resting_request_lets_others_work_up_to_the_number_in_memory() -> None:
    async def run() -> list[str]:
        requests = LargeRequests(2)
        order: list[str] = []
        raw = b'{"prompt":[%b1]}' % (b"1," * 10**5)
        rested = asyncio.Event()

        async def read(name: str) -> None:
            with Turn(requests) as turn:
                await decode.in_slices(raw, turn)
                order.append(name)
                await turn.rest()
                await rested.wait()
                await turn.pause()
                order.append(name)

        tasks = [asyncio.create_task(read(name)) for name in "abc"]
        while len(order) < 2:
            await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)
        order.append("rested")
        rested.set()
        await asyncio.gather(*tasks)
        assert not requests.working.is_full()
        return order

    order = asyncio.run(run())
    assert order[:3] == ["a", "b", "rested"]
    assert order.index("c") > min(order.index("a", 3), order.index("b", 3))


def test_a_rejected_body_ends_its_turn() -> None:
    async def run() -> bool:
        requests = LargeRequests(1)
        with pytest.raises(ApiError), Turn(requests) as turn:
            await decode_chat.in_slices(b'{"messages":[%b0]}' % (b"0," * 50_000), turn)
        return requests.working.is_full() or requests.in_memory.is_full()

    assert not asyncio.run(run())


def test_unknown_names_are_returned() -> None:
    async def run() -> list[str]:
        with Turn(LargeRequests(1)) as turn:
            raw = msgspec.json.encode({"prompt": "x", "é": {"inner": 1}, "n": 1, "a b": 2})
            return (await decode.in_slices(raw, turn))[1]

    assert asyncio.run(run()) == ["é", "a b"]


@pytest.mark.parametrize("rest", ['"' + '\\"' * 500_000, '"' * 1_000_001, '"' + "\\\\" * 500_000])
def test_counting_the_values_of_a_text_takes_a_time_in_proportion_to_it(rest: str) -> None:
    """This holds even if its strings have no end."""
    text = "," * (json_scan.MAX_VALUES + 1) + rest

    def measure() -> dict[str, float]:
        began = time.thread_time()
        assert json_scan.max_num_values(text) == json_scan.MAX_VALUES + 1
        return {"count_s": time.thread_time() - began}

    within(5, measure, count_s=0.2)


@pytest.mark.parametrize(
    ("text", "depth"),
    [
        ("3", 0),
        ("[[], {}]", 3),
        ("[" * 128, 128),
        ("[" * 129, 129),
        ("[" * 200 + "]" * 200, 200),
        ("[" + "[]," * 200 + "[]]", 2),
        ('["' + "[{" * 200 + '"]', 1),
    ],
)
def test_levels_of_a_text_are_counted(text: str, depth: int) -> None:
    """Up to the bound their number is not exact."""
    assert json_scan.max_depth(text) == depth


@pytest.mark.parametrize(("num_levels", "is_object"), [(128, True), (129, False), (900, False)])
def test_arguments_with_too_many_levels_are_text_for_a_template(
    num_levels: int, is_object: bool
) -> None:
    """Python code could not read them: it calls a function for each level."""
    text = '{"a":' * num_levels + "1" + "}" * num_levels
    shown = CalledFunction("f", text).for_template["arguments"]
    assert shown == (json.loads(text) if is_object else text)
