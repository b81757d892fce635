"""The OpenAPI document: it has every route, is well-formed, and describes what is returned."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from api_proc import app
from api_proc.openapi import routes as openapi
from api_proc.openapi.document import document
from api_proc.openapi.operations import OPERATIONS, Operation
from tests.api.fake_engine import LiveServer
from tests.paths import ROOT

DOCUMENT = document(OPERATIONS)
REFERENCE = re.compile(r"#/components/schemas/(\w+)")


def routes() -> set[tuple[str, str]]:
    """Return method and path of all routes of the application."""
    table = app._ROUTES + app._ADMIN_ROUTES
    return {(method, path.replace(":path}", "}")) for method, path, _ in table}


def test_every_route_is_in_the_document() -> None:
    assert {(item.method, item.path) for item in OPERATIONS} == routes()
    assert len(OPERATIONS) == len(routes())


def values(tree: Any) -> Iterator[Any]:
    """Yield all parts of a JSON value."""
    yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from values(part)


def test_document_is_well_formed() -> None:
    """The rules of OpenAPI 3.1 that this document could break."""
    assert DOCUMENT["openapi"].startswith("3.1.")
    assert set(DOCUMENT["info"]) >= {"title", "version"}
    names = DOCUMENT["components"]["schemas"].keys()
    assert all(name.isalpha() for name in names), "tools make names of classes of them"
    parts = [part for part in values(DOCUMENT) if isinstance(part, dict)]
    references = [part["$ref"] for part in parts if "$ref" in part]
    assert all(REFERENCE.fullmatch(reference) for reference in references)
    assert {reference.split("/")[-1] for reference in references} <= names
    operations = [op for methods in DOCUMENT["paths"].values() for op in methods.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    for path, methods in DOCUMENT["paths"].items():
        assert path.startswith("/")
        for method, operation in methods.items():
            assert method in {"get", "post", "delete"}
            assert "200" in operation["responses"]
            for status, response in operation["responses"].items():
                assert re.fullmatch(r"[1-5]\d\d", status)
                assert response["description"]
                assert all("schema" in part for part in response["content"].values())
            given = operation.get("parameters", [])
            in_path = {item["name"] for item in given if item["in"] == "path"}
            assert in_path == set(re.findall(r"\{(\w+)\}", path))
            assert all(item["required"] for item in given if item["in"] == "path")
            assert ("requestBody" in operation) <= (method == "post")
    kinds = {part["type"] for part in parts if isinstance(part.get("type"), str)}
    known = {"object", "array", "string", "integer", "number", "boolean", "null", "http"}
    assert kinds <= known


def test_errors_of_health_routes_have_the_fields_of_their_answers() -> None:
    readyz = DOCUMENT["paths"]["/readyz"]["get"]["responses"]
    assert readyz["503"]["content"] == readyz["200"]["content"]
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]
    reference = chat["503"]["content"]["application/json"]["schema"]["$ref"]
    assert reference.endswith("/ErrorResponse")
    assert set(chat["200"]["content"]) == {"application/json", "text/event-stream"}


def test_an_event_holds_a_piece_an_error_or_the_mark_of_the_end() -> None:
    chat = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]
    event = chat["content"]["text/event-stream"]["schema"]
    assert event["required"] == ["data"]
    end, piece = event["properties"]["data"]["anyOf"]
    assert end == {"const": "[DONE]"}
    references = [kind["$ref"].split("/")[-1] for kind in piece["contentSchema"]["anyOf"]]
    assert references == ["ChatChunk", "ErrorResponse"]


def test_every_status_that_the_server_raises_is_in_the_document() -> None:
    raised = {
        int(status)
        for path in (ROOT / "api_proc").rglob("*.py")
        for status in re.findall(r"(?:ApiError|_closing)\(\s*(\d{3})", path.read_text())
    }
    assert raised
    assert raised <= {status for item in OPERATIONS for status in item.errors}


@pytest.mark.parametrize(
    "item",
    [item for item in OPERATIONS if (item.method, item.tag) == ("POST", "admin")],
    ids=lambda item: item.path,
)
def test_a_body_is_described_with_the_parameters_of_its_query(item: Operation) -> None:
    """Admin routes take their parameters in either; null is the default in a body."""
    described = {parameter.name for parameter in item.parameters}
    if item.request is None:
        assert not described
        return
    fields = {field.encode_name for field in msgspec.structs.fields(item.request)}
    assert described == (set() if item.requires_body else fields)
    operation = DOCUMENT["paths"][item.path]["post"]
    assert operation["requestBody"]["required"] == item.requires_body
    msgspec.convert(item.example, item.request)
    if not item.requires_body:
        msgspec.convert(dict.fromkeys(fields), item.request)


def convertible(item: Operation) -> bool:
    return not isinstance(item.response, str) and item.tag != "admin" and "{" not in item.path


@pytest.mark.parametrize(
    "item", [item for item in OPERATIONS if convertible(item)], ids=lambda item: item.path
)
def test_the_server_returns_what_is_documented(http: httpx.Client, item: Operation) -> None:
    """The example of every body is accepted; the response has the documented fields and types."""
    body = item.example
    if item.path in ("/v1/embeddings", "/classify"):
        pytest.skip("see test_embeddings.py and test_scores.py")
    response = http.request(item.method, item.path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    converted = msgspec.json.decode(response.content, type=item.response)
    if isinstance(answer, dict):
        assert set(answer) <= set(msgspec.json.decode(msgspec.json.encode(converted)))


def test_a_server_without_admin_routes_does_not_list_them(server: LiveServer) -> None:
    listed = httpx.get(server.url + "/openapi.json").json()["paths"]
    assert "/v1/completions" in listed
    assert "/sleep" not in listed


def test_the_page_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    response = http.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"(src|href)=\"(https?:)?//", response.text)
    assert "innerHTML" not in response.text
    assert openapi._PAGE.is_file()


def test_the_documentation_lists_every_route_with_an_example() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for method, path in routes():
        assert f"`{method} {path}`" in text, (method, path)
