"""Turns errors into one sentence that names the model and states what to do."""

import errno
import importlib
import os
from urllib.parse import urlsplit

from huggingface_hub import constants, get_session, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from scripts.hub.messages import Refusal, one_line

UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 401, 403, 404
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class CutShort(Exception):
    """A response has ended before all of its bytes arrived."""


def hub_address() -> str:
    """Return the hub's address, without a user name and a password that it may contain."""
    endpoint: str = constants.ENDPOINT
    address = urlsplit(endpoint)
    return address._replace(netloc=address.netloc.rpartition("@")[2]).geturl()


def transport_error() -> type[Exception]:
    """Return the base class of connection errors in huggingface_hub's HTTP library."""
    library = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    error: type[Exception] = library.TransportError
    return error


def is_transient(error: Exception) -> bool:
    """Return True if the same request may succeed later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, CutShort | transport_error())


def why_not_fetched(name: str, revision: str | None, error: Exception) -> Refusal:
    """Return the refusal that describes an error."""
    hub = hub_address()
    if isinstance(error, RevisionNotFoundError):
        return Refusal(f"model {name} has no revision {revision or 'main'} at {hub}")
    if isinstance(error, GatedRepoError):
        return Refusal(f"model {name} is gated: {_how_to_enter(name)}")
    if isinstance(error, RemoteEntryNotFoundError):
        return Refusal(f"model {name} cannot be fetched: {hub} lists a file that it does not have")
    if isinstance(error, HfHubHTTPError):
        return _why_refused(name, revision, error)
    if isinstance(error, OfflineModeIsEnabled):
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        return _absent(
            name,
            f"is not complete in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set; "
            f"start once without it, or run `HF_HUB_OFFLINE=0 {command}`",
        )
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        text = (
            f"model {name} cannot be fetched: the disk of {constants.HF_HUB_CACHE} is full; free "
            "some space, or set HF_HUB_CACHE to a directory of another disk"
        )
        return Refusal(text)
    if isinstance(error, OSError):
        reason = os.strerror(error.errno) if error.errno else _one_line(error)
        where = error.filename or constants.HF_HUB_CACHE
        return Refusal(f"model {name} cannot be fetched: {where}: {reason}")
    if isinstance(error, HFValidationError):
        return _absent(name, "no model of a hub has such a name")
    if not is_transient(error):
        return Refusal(f"model {name} cannot be fetched: {why_unreachable(error)}")
    return _incomplete(name, why_unreachable(error))


def _why_refused(name: str, revision: str | None, error: HfHubHTTPError) -> Refusal:
    hub, status = hub_address(), error.response.status_code
    if status == UNAUTHORIZED:  # names that do not exist get it, too
        return _absent(
            name,
            f"does not exist at {hub}, or is private or gated: check the name, or "
            f"{_how_to_enter(name)}",
        )
    if status == FORBIDDEN:
        return Refusal(f"model {name}: {hub} denies access: {_how_to_enter(name)}")
    if status == NOT_FOUND:
        is_revision = revision and not isinstance(error, RepositoryNotFoundError)
        which = f"it or its revision {revision} " if is_revision else ""
        return _absent(name, f"{which}does not exist at {hub}")
    return _incomplete(name, f"{hub} answers {status}")


def _incomplete(name: str, reason: str) -> Refusal:
    return _absent(
        name,
        f"is not complete in the cache {constants.HF_HUB_CACHE}, and {reason}; "
        "start again to continue",
    )


def _absent(name: str, reason: str) -> Refusal:
    """Return the refusal for a name that may be a mistyped path."""
    return Refusal(f"model {name} is not a local path, and {reason}", is_absent=True)


def why_unreachable(error: Exception) -> str:
    """Return why the hub does not serve a model that may be in the cache."""
    if isinstance(error, HfHubHTTPError):
        return f"{hub_address()} answers {error.response.status_code}"
    if not is_transient(error):
        what = f"{type(error).__name__}: {_one_line(error)}"
        return f"{hub_address()} gives no valid answer ({what})"
    return f"{hub_address()} cannot be reached ({_one_line(error)})"


def _how_to_enter(name: str) -> str:
    place = f"{hub_address()}/{name}"
    if get_token() is None:
        return f"ask for access at {place}, then run `hf auth login` or set HF_TOKEN"
    return f"the token in use may not read it; ask for access at {place}"


def _one_line(error: Exception) -> str:
    text = one_line(str(error)).replace(constants.ENDPOINT, hub_address())
    return text or type(error).__name__
