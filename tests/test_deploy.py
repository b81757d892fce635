"""The examples in docs/deploy: their flags exist, and their own tools can read them."""

import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.config import EngineConfig
from tests.paths import DOCS, ROOT

DEPLOY = DOCS / "deploy"


def flags() -> set[str]:
    sections = (getattr(EngineConfig(), name) for name in EngineConfig.__struct_fields__)
    names = {name for section in sections for name in section.__struct_fields__}
    flags_of_agents = {"--join", "--listen"}
    return {"--no-api", *flags_of_agents, *(f"--{name.replace('_', '-')}" for name in names)}


EXAMPLES = sorted(path for path in DEPLOY.iterdir() if path.name != "Dockerfile")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_flag_exists(path: Path) -> None:
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text()))
    assert len(used) > 2
    assert used <= flags()


def test_the_image_is_made_of_what_a_wheel_is_made_of() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith("COPY ") and "--from" not in line]
    copied = {name for _, *names, _ in words for name in names}
    script = (ROOT / "scripts" / "wheel").read_text()
    assert copied == set(re.findall(r"^cp -r (.*) \"\$scratch\"$", script, re.MULTILINE)[0].split())
    assert lines[-1] == 'ENTRYPOINT ["troika"]'
    assert "troika" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def pods(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the specifications of all pods in a manifest."""
    if isinstance(part, dict) and "containers" in part:
        yield part
    inner = part.values() if isinstance(part, dict) else part
    for each in inner if isinstance(part, dict | list) else ():
        yield from pods(each)


def test_the_user_of_the_image_is_not_root_and_can_read_the_keys_of_a_pod() -> None:
    """A file of a secret belongs to root; `fsGroup` makes a group its reader."""
    (user,) = re.findall(r"^USER (\d+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert int(user) > 0
    manifests = ("agents.yaml", "kuberay.yaml", "statefulset.yaml")
    parts = [part for name in manifests for part in yaml.safe_load_all((DEPLOY / name).read_text())]
    with_keys = [pod for pod in pods(parts) if "secret" in str(pod.get("volumes"))]
    assert [pod["securityContext"]["fsGroup"] for pod in with_keys] == [int(user)] * 5


def test_yaml_can_be_read() -> None:
    kinds = [part["kind"] for part in yaml.safe_load_all((DEPLOY / "statefulset.yaml").read_text())]
    assert kinds == ["Service", "StatefulSet"]
    kinds = [part["kind"] for part in yaml.safe_load_all((DEPLOY / "agents.yaml").read_text())]
    assert kinds == ["Service", "Service", "Deployment", "Deployment"]
    kinds = [part["kind"] for part in yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())]
    assert kinds == ["RayCluster", "Service", "Deployment"]
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert set(services) == {"engine-a", "engine-b", "api"}


def test_an_update_by_kubernetes_waits_until_a_container_serves() -> None:
    """Without a probe it would end the next engine while the model of this one loads."""
    for name in ("statefulset.yaml", "agents.yaml", "kuberay.yaml"):
        for part in yaml.safe_load_all((DEPLOY / name).read_text()):
            if part["kind"] in ("StatefulSet", "Deployment"):
                containers = part["spec"]["template"]["spec"]["containers"]
                assert all("readinessProbe" in container for container in containers), name
    service, _ = yaml.safe_load_all((DEPLOY / "statefulset.yaml").read_text())
    assert service["spec"]["publishNotReadyAddresses"]


def test_agents_can_join_before_the_api_is_ready() -> None:
    """A service lists the API's container from its start on."""
    parts = [*yaml.safe_load_all((DEPLOY / "agents.yaml").read_text())]
    services = {part["metadata"]["name"]: part["spec"] for part in parts[:2]}
    arguments = parts[-1]["spec"]["template"]["spec"]["containers"][0]["args"]
    name, _, port = arguments[arguments.index("--join") + 1].partition(":")
    service = services[name]
    assert service["publishNotReadyAddresses"]
    assert [one["port"] for one in service["ports"]] == [int(port)]
    assert service["selector"] == services["head"]["selector"]
    assert "publishNotReadyAddresses" not in services["head"], "HTTP goes to a ready API"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_finds_nothing_but_the_missing_program() -> None:
    command = ["systemd-analyze", "verify", str(DEPLOY / "troika.service")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in found.stderr.splitlines() if "is not executable" not in line]
    assert not [line for line in lines if "troika.service" in line]
