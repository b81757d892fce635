"""The client that a piece of work is for, as all processes name it."""

from typing import NamedTuple


class Account(NamedTuple):
    """The client that a piece of work is for."""

    origin: str = ""
    """The API key or the address that sent the request; clients cannot choose it freely."""
    tenant: str = ""
    """The request's tenant among those of its origin."""
