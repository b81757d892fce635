"""Makes the environment of a client in a cache directory, of packages from PyPI, npm or Debian."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

INSTALL_TIMEOUT_S = 1200.0
PROGRAMS = Path(__file__).with_name("programs")


class Unavailable(Exception):
    """The environment cannot be made on this machine, for the reason in its text."""


class Environment(Protocol):
    """Where one client is installed. `repr` names everything that is installed."""

    def make(self, directory: Path) -> None:
        """Install the client into an empty directory."""

    def command(self, directory: Path, program: str) -> list[str]:
        """Return the command that runs a file of `programs` in it."""

    def versions(self, directory: Path) -> dict[str, str]:
        """Return the installed version of each package that the environment names."""


def ensure(environment: Environment, directory: Path) -> None:
    """Make an environment unless it exists as described; raises `Unavailable`."""
    stamp = directory / "installed"
    if stamp.is_file() and stamp.read_text() == repr(environment):
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    environment.make(directory)
    stamp.write_text(repr(environment))


@dataclass(frozen=True)
class PythonPackages:
    """A virtual environment with packages of PyPI."""

    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    """Packages that are removed again."""
    at_least: tuple[int, int] = (3, 11)
    """Version of Python."""

    def make(self, directory: Path) -> None:
        venv = directory / "venv"
        _run(find_python(self.at_least), "-m", "venv", str(venv))
        pip = (str(venv / "bin" / "python"), "-m", "pip")
        _run(*pip, "install", "--quiet", "--no-compile", *self.requirements)
        if self.removed:
            _run(*pip, "uninstall", "--quiet", "--yes", *self.removed)

    def command(self, directory: Path, program: str) -> list[str]:
        return [str(directory / "venv" / "bin" / "python"), str(PROGRAMS / program)]

    def versions(self, directory: Path) -> dict[str, str]:
        first = re.match(r"[\w.-]+", self.requirements[0])
        assert first is not None
        python = str(directory / "venv" / "bin" / "python")
        code = f"import importlib.metadata as m; print(m.version({first.group()!r}))"
        return {first.group(): _run(python, "-c", code).strip()}


@dataclass(frozen=True)
class NodePackages:
    """A directory with packages of npm. Programs are copied into it, since node searches there."""

    packages: tuple[str, ...]
    at_least: int = 18
    """Major version of node."""

    def make(self, directory: Path) -> None:
        npm = shutil.which("npm")
        if npm is None or shutil.which("node") is None:
            raise Unavailable("node and npm are not installed")
        found = _run("node", "--version").strip()
        if int(found.removeprefix("v").split(".")[0]) < self.at_least:
            raise Unavailable(f"node {found} is older than {self.at_least}")
        _run(npm, "install", "--no-audit", "--no-fund", "--prefix", str(directory), *self.packages)

    def command(self, directory: Path, program: str) -> list[str]:
        for path in PROGRAMS.glob("*.mjs"):
            shutil.copy(path, directory)
        return ["node", str(directory / program)]

    def versions(self, directory: Path) -> dict[str, str]:
        versions = {}
        for name in (package.rpartition("@")[0] for package in self.packages):
            manifest = directory / "node_modules" / name / "package.json"
            versions[name] = str(json.loads(manifest.read_text())["version"])
        return versions


@dataclass(frozen=True)
class DebianPackage:
    """The files of a Debian package, unpacked and not installed."""

    name: str

    def make(self, directory: Path) -> None:
        for program in ("apt-get", "dpkg-deb"):
            if shutil.which(program) is None:
                raise Unavailable(f"{program} is not installed")
        _run("apt-get", "download", "--quiet", self.name, cwd=directory)
        _run("dpkg-deb", "-x", str(self._archive(directory)), str(directory / "root"))

    def command(self, directory: Path, program: str) -> list[str]:
        return [sys.executable, str(PROGRAMS / program)]

    def versions(self, directory: Path) -> dict[str, str]:
        version = _run("dpkg-deb", "-f", str(self._archive(directory)), "Version")
        return {self.name: version.strip()}

    @staticmethod
    def _archive(directory: Path) -> Path:
        return next(directory.glob("*.deb"))


def find_python(at_least: tuple[int, int]) -> str:
    """Return an interpreter of this version or a later one: this one, or one in the path."""
    test = f"import sys; sys.exit(sys.version_info < {at_least})"
    for minor in (None, *range(at_least[1], 15)):
        python = sys.executable if minor is None else shutil.which(f"python3.{minor}")
        if python is not None:
            command = [python, "-c", test]
            if not subprocess.run(command, capture_output=True, check=False).returncode:
                return python
    raise Unavailable(f"Python {at_least[0]}.{at_least[1]} or newer is not in the path")


def _run(*command: str, cwd: Path | None = None) -> str:
    environ = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environ.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=environ,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} took longer than {INSTALL_TIMEOUT_S:g} s") from None
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise Unavailable(f"the installation failed: {' '.join(last)[:200]}")
    return done.stdout
