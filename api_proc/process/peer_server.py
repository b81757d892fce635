"""The server that the other API processes of an engine reach, and its share of the connections."""

from api_proc.app import peer_app
from api_proc.http.acceptor import max_connections
from api_proc.http.server import HttpServer
from api_proc.peers.directory import Directory
from api_proc.peers.peers import MAX_ASKED, MAX_FORWARDED, Peers
from api_proc.state import ApiState
from protocol.config import ApiConfig
from protocol.process.child_runtime import ChildProcess

_SUCCESSOR_START_S = 15.0
"""Time in which the successor of a dead API process is expected to serve."""


def join_peers(child: ChildProcess, state: ApiState) -> HttpServer | None:
    """Return the server that the other API processes reach; None: there are no others."""
    api = child.config.api
    if api.api_server_count == 1:
        return None
    directory = Directory(child.run_dir, child.rank, child.epoch)
    owner_timeout_s = child.config.recovery.shutdown_timeout_s + _SUCCESSOR_START_S
    state.peers = Peers(directory, state.ids, owner_timeout_s, _num_forwarded(api))
    return HttpServer(
        peer_app(state),
        slow_reader_timeout_s=api.slow_reader_timeout_s,
        on_slow_reader=state.metrics.count_slow_reader,
        limit=_num_peer_connections(api),
    )


def num_client_connections(api: ApiConfig) -> int:
    """Return how many connections are left for clients, besides those between API processes."""
    return max_connections() - _num_forwarded(api) - _num_peer_connections(api)


def _num_forwarded(api: ApiConfig) -> int:
    """Return how many requests this process may forward at a time."""
    num_others = api.api_server_count - 1
    return min(MAX_FORWARDED, max_connections() // 4) // num_others if num_others else 0


def _num_peer_connections(api: ApiConfig) -> int:
    """Return how many connections all other processes together may have to this one."""
    return (api.api_server_count - 1) * (_num_forwarded(api) + MAX_ASKED)
