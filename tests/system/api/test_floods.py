"""A flood of large bodies kills no process, and the API's memory stays bounded."""

import pytest

from protocol.lifecycle import Role
from scripts.testing import EngineFactory
from tests.system.body_flood import BODIES, ENGINES, flood

GROWTH_MAX_MIB = 300
LIVEZ_P99_S = 0.05


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("context", "names"),
    [
        ("short", ["objects"]),
        ("short", ["prompts"]),
        ("short", list(BODIES)),
        ("long", ["literal", "chat"]),
        ("long", list(BODIES)),
    ],
    ids=str,
)
def test_a_flood_kills_no_process_and_bounds_memory_and_latency(
    start_engine: EngineFactory, context: str, names: list[str]
) -> None:
    engine = start_engine(*ENGINES[context])
    engine.readiness()
    pids = {role: engine.pid(role) for role in (Role.API, Role.CORE, Role.WORKER)}
    found = flood(engine, names, 62)
    assert {role: engine.pid(role) for role in pids} == pids
    assert found.growth_mib <= GROWTH_MAX_MIB
    assert found.livez_p99_s <= LIVEZ_P99_S
