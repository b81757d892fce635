"""An engine of the null model that other machines can reach, at an address of this one."""

from pathlib import Path

from scripts.testing import Engine, EngineFactory
from tests.ports import free_port


class Machine:
    """An engine that other machines can reach."""

    def __init__(
        self, start_engine: EngineFactory, keys: Path, port: int = 0, model: str = "null"
    ) -> None:
        self.port = port or free_port()
        listen = ("--core-listen", f"127.0.0.1:{self.port}", "--curve-keys", str(keys))
        self.engine: Engine = start_engine("--no-api", "--null-step-ms", "5", *listen, model=model)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"
