"""The core process: `python -m core_proc --run-dir DIR`, or started by a supervisor."""

import sys

from core_proc.engine import EngineCore, FactsChanged
from core_proc.loop import CoreLoop
from protocol.lifecycle import Role
from protocol.process import ChildProcess


def main() -> None:
    """Serve until told to stop."""
    child = ChildProcess.from_argv("core_proc", Role.CORE, sys.argv[1:])
    loop = CoreLoop(child, EngineCore(child.config))
    child.ready()
    try:
        loop.run()
    except FactsChanged as error:
        child.fatal("adopting workers", error, "a new core begins with the new facts")
    except Exception as error:
        child.fatal("running", error)


if __name__ == "__main__":
    main()
