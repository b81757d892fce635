"""Sets a deadline for every request to the hub; some of huggingface_hub's have none."""

from typing import Any

from huggingface_hub import constants, get_session, set_client_factory

CONNECT_TIMEOUT_S = 2.0
"""An unreachable hub is reported within three seconds, like every refusal."""


def bound_waits() -> None:
    """Set deadlines for all requests of this process."""
    session = get_session()
    hooks = session.event_hooks
    hooks["request"].append(_set_timeouts)

    def make_client() -> Any:
        return type(session)(event_hooks=hooks, follow_redirects=True, timeout=None)

    set_client_factory(make_client)


def _set_timeouts(request: Any) -> None:
    given = request.extensions.get("timeout") or {}
    longest = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
    timeouts = {name: given.get(name) or longest for name in ("read", "write", "pool")}
    connect = min(given.get("connect") or longest, CONNECT_TIMEOUT_S)
    request.extensions["timeout"] = {**timeouts, "connect": connect}
