"""Prometheus' own linter over /metrics, after the other clients have used the server."""

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from checks import URL, check, main

ROOT = Path(__file__).resolve().parents[3]
PROMTOOL = Path(os.environ["CLIENT_DIRECTORY"]) / "root" / "usr" / "bin" / "promtool"
COLON = "metric names should not contain ':'"
NOT_A_COUNTER = (
    "troika:iteration_tokens_total",
    'non-counter metrics should not have "_total" suffix',
)
"""A histogram, whose name is vLLM's."""


def problems() -> list[tuple[str, str]]:
    """Return the names of metrics with what the linter finds wrong with each."""
    with urllib.request.urlopen(URL + "/metrics", timeout=10) as response:
        text = response.read()
    command = [PROMTOOL, "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, timeout=60, check=False)
    assert done.returncode in (0, 3), done.stderr.decode()
    lines = (done.stdout + done.stderr).decode().splitlines()
    return [(name, problem) for name, _, problem in (line.partition(" ") for line in lines)]


@check
def names_with_a_colon_are_those_of_vllm() -> None:
    sys.path.insert(0, str(ROOT))
    from api_proc.metrics.names import VLLM_NAMES

    found = {name.partition(":")[2] for name, problem in problems() if problem == COLON}
    known = {name if name in VLLM_NAMES else name.removesuffix("_total") for name in found}
    assert known == VLLM_NAMES - {"lora_requests_info"}, known ^ VLLM_NAMES


@check
def nothing_else_is_wrong() -> None:
    others = [item for item in problems() if item[1] != COLON and item != NOT_A_COUNTER]
    assert not others, others


if __name__ == "__main__":
    main()
