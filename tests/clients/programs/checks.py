"""Runs the checks of a program and prints one line for each; it needs no package.

    passed NAME
    failed NAME
    skipped NAME: REASON

A program is started as `PROGRAM URL DIRECTORY`: the root of the server, and an empty directory.
"""

import json
import os
import subprocess
import sys
import traceback
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL = sys.argv[1]
DIRECTORY = Path(sys.argv[2])
MODEL = "demo"
MODEL_DIRECTORY = Path(__file__).resolve().parents[3] / "scripts" / "demo_model"
COMMAND_TIMEOUT_S = 800

_checks: list[Callable[[], None]] = []


class Skipped(Exception):
    """A check does not apply to this server."""


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add a check, whose name is that of the function with spaces."""
    _checks.append(function)
    return function


def require_route(path: str) -> None:
    """Skip the check if the server has no such route."""
    with urllib.request.urlopen(URL + "/openapi.json", timeout=10) as response:
        if path not in json.load(response)["paths"]:
            raise Skipped(f"the server has no route {path}")


def error_of(kind: type[Exception], call: Callable[..., object], **options: Any) -> Any:
    """Return the error that a call raises; it fails if there is none."""
    try:
        call(**options)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def run_tool(*command: str, **environ: str) -> str:
    """Run a program of this environment; return its output, or fail with it."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        env=os.environ | {"PATH": path} | environ,
        cwd=DIRECTORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-8000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def main() -> None:
    """Run all checks; the exit status is 1 if one has failed."""
    num_failed = 0
    for function in _checks:
        name = function.__name__.replace("_", " ")
        try:
            function()
        except Skipped as reason:
            print(f"skipped {name}: {reason}", flush=True)
        except Exception:
            traceback.print_exc()
            num_failed += 1
            print(f"failed {name}", flush=True)
        else:
            print(f"passed {name}", flush=True)
    sys.exit(num_failed > 0)
