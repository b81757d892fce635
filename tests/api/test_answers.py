"""Whole answers: text, usage, logprobs, prompts in all forms, sampling parameters resolved."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.api_core import EngineState, ErrorCode, RequestError
from protocol.client.errors import RequestFailed
from protocol.sampling import SamplingParams
from tests.api.conftest import MakeServer
from tests.api.fake_engine import EOS_ID, REPLY, FakeClient, LiveServer, emitting, ids_of, repeating

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def post(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(COMPLETIONS, json={"prompt": "hi"} | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(CHAT, json={"messages": MESSAGES} | fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def params_of(live: LiveServer, body: dict[str, Any], path: str = COMPLETIONS) -> SamplingParams:
    """Return the parameters that the engine receives."""
    default = {"prompt": "hi"} if path == COMPLETIONS else {"messages": MESSAGES}
    response = httpx.post(live.url + path, json=default | body)
    assert response.status_code == 200, response.text
    return live.client.requests[-1].sampling_params


def test_completion_has_openais_shape(http: httpx.Client) -> None:
    answer = post(http, max_tokens=9)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "null"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "The quick",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 9,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat_has_openais_shape(http: httpx.Client) -> None:
    answer = chat(http, max_tokens=3)
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"] == {"content": "The", "role": "assistant", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [ids_of("hi")]),
        (["hi", "ho"], [ids_of("hi"), ids_of("ho")]),
        ([7, 8], [[7, 8]]),
        ([[7, 8], [9]], [[7, 8], [9]]),
    ],
)
def test_a_prompt_may_have_four_forms(
    make_server: MakeServer, prompt: Any, expected: list[Any]
) -> None:
    live = make_server()
    answer = httpx.post(live.url + COMPLETIONS, json={"prompt": prompt, "max_tokens": 3}).json()
    assert [add.prompt_token_ids for add in live.client.requests] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_n_sequences_of_a_prompt_have_consecutive_seeds(make_server: MakeServer) -> None:
    live = make_server()
    body = {"prompt": ["a", "b"], "n": 3, "seed": 2**63 - 2, "max_tokens": 2, "best_of": 3}
    answer = httpx.post(live.url + COMPLETIONS, json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    seeds = [add.sampling_params.seed for add in live.client.requests]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63)] * 2
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 12


def test_seed_is_drawn_reproducibly_only_where_configured(make_server: MakeServer) -> None:
    def seeds(seed: int) -> list[int]:
        live = make_server(seed=seed)
        return [params_of(live, {}).seed for _ in range(3)]

    assert seeds(7) == seeds(7)
    assert len({*seeds(7), *seeds(0), *seeds(0)}) == 9


def test_every_sampling_field_reaches_the_engine(make_server: MakeServer) -> None:
    fields = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -5,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.2,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [5, 6],
        "logit_bias": {"7": -100.0},
        "logprobs": 3,
        "prompt_logprobs": 2,
    }
    expected = SamplingParams(**fields | {"logit_bias": {7: -100.0}})
    assert params_of(make_server(), fields) == expected


def test_chat_without_max_tokens_uses_the_rest_of_the_context(make_server: MakeServer) -> None:
    live = make_server()
    params = params_of(live, {"stop": "quick"}, CHAT)
    assert params.max_tokens == 512 - len("user: hi\nassistant: ")
    assert params_of(live, {"max_completion_tokens": 5, "max_tokens": 9}, CHAT).max_tokens == 5


def test_completion_without_max_tokens_has_sixteen_or_the_rest(make_server: MakeServer) -> None:
    live = make_server()
    assert params_of(live, {}).max_tokens == 16
    assert params_of(live, {"prompt": "x" * 510}).max_tokens == 2


def test_prompt_is_truncated_on_request(make_server: MakeServer) -> None:
    live = make_server()
    for truncate, prompt, expected in (
        (3, "abcdef", ids_of("def")),
        (3, [1, 2, 3, 4, 5], [3, 4, 5]),
        (-1, "x" * 1000, ids_of("x" * 502)),
    ):
        body = {"prompt": prompt, "truncate_prompt_tokens": truncate, "max_tokens": 10}
        assert httpx.post(live.url + COMPLETIONS, json=body).status_code == 200
        assert live.client.requests[-1].prompt_token_ids == expected


def test_priority_and_salt_reach_the_engine(make_server: MakeServer) -> None:
    live = make_server()
    params_of(live, {"priority": -3, "cache_salt": "tenant"})
    assert (live.client.requests[-1].priority, live.client.requests[-1].cache_salt) == (
        -3,
        "tenant",
    )


@pytest.mark.parametrize("per_output", [1, 7, 1000])
def test_stop_string_cuts_text_and_cancels(make_server: MakeServer, per_output: int) -> None:
    live = make_server(FakeClient(script=repeating(per_output=per_output)))
    body = {"prompt": "hi", "max_tokens": 400, "stop": ["brown", "lazy"]}
    answer = httpx.post(live.url + COMPLETIONS, json=body).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "The quick ",
        "stop",
        "brown",
    )
    assert answer["usage"]["completion_tokens"] == len("The quick brown")
    assert live.client.cancelled == ([1] if per_output < 1000 else [])


def test_stop_string_is_shown_on_request(http: httpx.Client) -> None:
    answer = post(http, max_tokens=40, stop="brown", include_stop_str_in_output=True)
    assert answer["choices"][0]["text"] == "The quick brown"


def test_stop_strings_count_only_after_min_tokens(http: httpx.Client) -> None:
    answer = post(http, max_tokens=100, min_tokens=20, stop="The")
    assert answer["choices"][0]["text"] == REPLY
    assert answer["usage"]["completion_tokens"] == len(REPLY) + 3


def test_end_token_is_counted_but_not_shown(make_server: MakeServer) -> None:
    live = make_server(FakeClient(script=emitting([*ids_of("Hi!"), EOS_ID, *ids_of("more")])))
    with httpx.Client(base_url=live.url) as http:
        answer = post(http, max_tokens=50)
        assert answer["choices"][0]["text"] == "Hi!"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 4
        shown = post(http, max_tokens=50, include_stop_str_in_output=True)
        assert shown["choices"][0]["text"] == f"Hi!<{EOS_ID}>"


def test_echo_with_logprobs_covers_prompt_and_output(http: httpx.Client) -> None:
    """Evaluation harnesses send such requests: token ids in, a logprob for every token out."""
    answer = post(http, prompt=ids_of("hé"), max_tokens=2, echo=True, logprobs=1)
    [choice] = answer["choices"]
    assert choice["text"] == "héTh"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "\ufffd", "\ufffd", "T", "h"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"T": -0.5}


@pytest.mark.parametrize("fields", [{}, {"skip_special_tokens": False}, {"parse_special": False}])
@pytest.mark.parametrize("added", [True, False])
def test_offsets_are_those_of_an_echoed_text_with_special_tokens(
    make_server: MakeServer, checkpoint: Path, fields: dict[str, Any], *, added: bool
) -> None:
    """The token that the tokenizer adds is not in the text; those that the client wrote are."""
    prompt = "<s>The fox<|im_end|>jumps"
    live = make_server(model=str(checkpoint))
    with httpx.Client(base_url=live.url) as http:
        fields = fields | {"prompt": prompt, "add_special_tokens": added}
        [choice] = post(http, **fields, max_tokens=2, echo=True, logprobs=0)["choices"]
        ids = http.post("/tokenize", json=fields).json()["tokens"]
        hidden = post(http, prompt=ids, max_tokens=2, echo=True, logprobs=0)["choices"][0]
    num_parsed = 0 if "parse_special" in fields else 2
    for found, num_hidden in ((choice, added), (hidden, added + num_parsed)):
        tokens, offsets = (found["logprobs"][name] for name in ("tokens", "text_offset"))
        spans = zip(offsets, [*offsets[1:], len(found["text"])], strict=True)
        texts = [found["text"][first:last] for first, last in spans]
        different = [
            (token, text)
            for token, text in zip(tokens[: len(ids)], texts, strict=False)
            if token != text
        ]
        assert len(different) == num_hidden
        assert all(not text for _, text in different)


def test_impossible_candidates_are_clamped(http: httpx.Client) -> None:
    answer = post(http, max_tokens=1, logprobs=3)
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [
        {"T": -0.5, "U": -1.5, "V": -9999.0}
    ]


def test_logprobs_stop_with_the_stop_string(http: httpx.Client) -> None:
    [choice] = post(http, max_tokens=40, stop="quick", logprobs=0)["choices"]
    assert choice["text"] == "The "
    assert "".join(choice["logprobs"]["tokens"]) == "The quick"
    assert choice["logprobs"]["text_offset"] == list(range(9))


def test_chat_logprobs_have_bytes(http: httpx.Client) -> None:
    [choice] = chat(http, max_tokens=1, logprobs=True, top_logprobs=2)["choices"]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "T",
                "logprob": -0.5,
                "bytes": [84],
                "top_logprobs": [
                    {"token": "T", "logprob": -0.5, "bytes": [84]},
                    {"token": "U", "logprob": -9999.0, "bytes": [85]},
                ],
            }
        ],
        "refusal": None,
    }


def test_prompt_logprobs_and_token_ids_are_returned_on_request(http: httpx.Client) -> None:
    answer = post(http, max_tokens=2, prompt_logprobs=1, return_token_ids=True)
    [choice] = answer["choices"]
    assert choice["prompt_token_ids"] == ids_of("hi")
    assert choice["token_ids"] == ids_of("Th")
    i = str(ids_of("i")[0])
    assert choice["prompt_logprobs"] == [
        None,
        {i: {"logprob": -0.5, "rank": 1, "decoded_token": "i"}},
    ]
    answer = chat(http, max_tokens=2, prompt_logprobs=0, return_token_ids=True)
    assert answer["prompt_token_ids"] == ids_of("user: hi\nassistant: ")
    assert answer["choices"][0]["token_ids"] == ids_of("Th")
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])


def test_logprobs_name_tokens_by_their_ids_on_request(http: httpx.Client) -> None:
    first, second = (f"token_id:{ids_of(letter)[0]}" for letter in "TU")
    options = {"max_tokens": 1, "return_tokens_as_token_ids": True}
    [choice] = post(http, logprobs=1, **options)["choices"]
    assert choice["text"] == "T"
    assert choice["logprobs"]["tokens"] == [first]
    assert list(choice["logprobs"]["top_logprobs"][0]) == [first]
    [choice] = chat(http, logprobs=True, top_logprobs=2, **options)["choices"]
    [content] = choice["logprobs"]["content"]
    assert (content["token"], content["bytes"]) == (first, [84])
    assert [top["token"] for top in content["top_logprobs"]] == [first, second]


def test_text_parts_are_joined_and_developers_are_the_system(make_server: MakeServer) -> None:
    live = make_server()
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "c"},
    ]
    httpx.post(live.url + CHAT, json={"messages": messages, "max_tokens": 1})
    expected = ids_of("system: rules\nuser: a\nb\nassistant: no\nuser: c\nassistant: ")
    assert live.client.requests[-1].prompt_token_ids == expected


def test_a_prompt_of_one_token_has_no_log_probability(make_server: MakeServer) -> None:
    body = {"prompt": [5], "max_tokens": 1, "prompt_logprobs": 1, "logprobs": 1, "echo": True}
    [choice] = httpx.post(make_server().url + COMPLETIONS, json=body).json()["choices"]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"]["token_logprobs"][0] is None


def test_an_error_begins_with_its_field(make_server: MakeServer) -> None:
    """The name of the field may also be a part of another word in the text."""
    live = make_server()
    for text, shown in (
        ("nothing is known of it", "n: nothing is known of it"),
        ("n 5 is too many", "n 5 is too many"),
    ):
        live.client.refusal = RequestFailed(RequestError(ErrorCode.INVALID, text, "n"))
        error = httpx.post(live.url + COMPLETIONS, json={"prompt": "x"}).json()["error"]
        assert (error["param"], error["message"]) == ("n", shown)


def overloaded(client: FakeClient) -> None:
    client.refusal = RequestFailed(RequestError(ErrorCode.OVERLOADED, "queue of 5 is full"))


def starting(client: FakeClient) -> None:
    client.refusal = RequestFailed(RequestError(ErrorCode.STARTING, "all replicas have left"))


def draining(client: FakeClient) -> None:
    client.refusal = RequestFailed(RequestError(ErrorCode.DRAINING, "shutting down"))


def broken(client: FakeClient) -> None:
    client.refusal = RequestFailed(RequestError(ErrorCode.INTERNAL, "lost"))


def not_finite(client: FakeClient) -> None:
    client.refusal = RequestFailed(RequestError(ErrorCode.COMPUTATION_FAILED, "not finite"))


@pytest.mark.parametrize(
    ("prepare", "status", "code"),
    [
        (overloaded, 429, "overloaded"),
        (draining, 503, "draining"),
        (starting, 503, "starting"),
        (broken, 500, "internal_error"),
        (not_finite, 500, "computation_failed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_error_of_the_engine_has_its_status(
    make_server: MakeServer,
    prepare: Callable[[FakeClient], None],
    status: int,
    code: str,
    stream: bool,
) -> None:
    client = FakeClient()
    prepare(client)
    live = make_server(client)
    response = httpx.post(live.url + COMPLETIONS, json={"prompt": "x", "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("retry-after" in response.headers) == (status in (429, 503))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": ["x"] * 9}),
        (COMPLETIONS, {"prompt": ["x"] * 3, "n": 3, "stream": True}),
        (COMPLETIONS, {"prompt": [[5] * 30, [6] * 51]}),
        ("/v1/embeddings", {"input": ["x"] * 9}),
    ],
)
def test_a_request_beyond_a_share_of_the_queue_is_not_asked_to_come_again(
    make_server: MakeServer, path: str, fields: dict[str, Any]
) -> None:
    """Smaller ones are, as is a single prompt of any length."""
    client = FakeClient()
    overloaded(client)
    live = make_server(client, max_num_waiting=9, max_waiting_tokens=90)
    refused = httpx.post(live.url + path, json=fields)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert re.match("max_(num_waiting: 9|waiting_tokens: 81) .* are more than 80?, ", message)
    for prompt in (["x"] * 8, [[5] * 40, [6] * 40], [5] * 90):
        smaller = {("input" if "input" in fields else "prompt"): prompt}
        assert httpx.post(live.url + path, json=smaller).status_code == 429


def test_starting_engine_is_unavailable(make_server: MakeServer) -> None:
    live = make_server(FakeClient(facts=None))
    response = httpx.post(live.url + COMPLETIONS, json={"prompt": "x"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


def test_recovering_engine_accepts_requests(make_server: MakeServer) -> None:
    client = FakeClient()
    client.report(EngineState.RECOVERING)
    live = make_server(client)
    assert httpx.post(live.url + COMPLETIONS, json={"prompt": "x"}).status_code == 200


def test_a_rejected_prompt_cancels_the_others(make_server: MakeServer) -> None:
    live = make_server()
    body = {"prompt": [[5], [6], [1000]], "max_tokens": 400}
    response = httpx.post(live.url + COMPLETIONS, json=body)
    assert response.status_code == 400
    assert live.client.cancelled == [1, 2]


def test_logprobs_of_a_prompt_are_computed_once_for_all_its_sequences(
    make_server: MakeServer,
) -> None:
    """Each choice has them, also where they are echoed. Streams: tests/api/test_sequences.py."""
    client = FakeClient()
    with httpx.Client(base_url=make_server(client).url) as http:
        body = {"prompt": ["abc", "de"], "n": 3, "max_tokens": 2, "logprobs": 1, "echo": True}
        choices = http.post(COMPLETIONS, json=body | {"prompt_logprobs": 2}).json()["choices"]
        asked = [add.sampling_params.prompt_logprobs for add in client.requests]
        assert asked == [2, None, None, 2, None, None]
        assert [len(c["prompt_logprobs"]) for c in choices] == [3] * 3 + [2] * 3
        offsets = [c["logprobs"]["text_offset"] for c in choices[2:4]]
        assert offsets == [[0, 1, 2, 3, 4], [0, 1, 2, 3]]
        assert [c["logprobs"]["token_logprobs"][0] for c in choices] == [None] * 6
