"""GET /openapi.json and GET /docs."""

from functools import lru_cache
from pathlib import Path

import msgspec

from api_proc.http.connection import Connection
from api_proc.openapi.document import document
from api_proc.openapi.operations import OPERATIONS
from api_proc.state import ApiState

_PAGE = Path(__file__).with_name("docs.html")
_PAGE_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; connect-src 'self'; script-src 'unsafe-inline';"
        b" style-src 'unsafe-inline'",
    ),
    (b"x-content-type-options", b"nosniff"),
)


async def openapi_json(state: ApiState, connection: Connection) -> None:
    """GET /openapi.json: the document of this server's routes."""
    with_admin = state.config.api.enable_admin_routes
    await connection.send(200, _encoded_document(with_admin))


async def docs_page(state: ApiState, connection: Connection) -> None:
    """GET /docs: a page that renders the document; it loads nothing from elsewhere."""
    await connection.send(200, _page(), _PAGE_HEADERS, b"text/html; charset=utf-8")


@lru_cache
def _page() -> bytes:
    return _PAGE.read_bytes()


@lru_cache
def _encoded_document(with_admin: bool) -> bytes:
    operations = (item for item in OPERATIONS if with_admin or item.tag != "admin")
    return msgspec.json.encode(document(operations))
