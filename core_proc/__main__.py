"""The core process: `python -m core_proc --run-dir DIR`, or started by a supervisor."""

import contextlib
import os
import sys

from core_proc.engine import EngineCore, FactsChanged
from core_proc.loop import CoreLoop
from protocol.failpoints import reach
from protocol.lifecycle import Role
from protocol.process import ChildProcess

CORE_NICENESS = -10


def main() -> None:
    """Serve until told to stop."""
    child = ChildProcess.from_argv("core_proc", Role.CORE, sys.argv[1:])
    reach("core.load")
    _raise_priority()
    child.restart_on_sigterm()
    loop = CoreLoop(child, EngineCore(child.config))
    child.ready()
    try:
        loop.run()
    except FactsChanged as error:
        child.fatal("adopting workers", error, "a new core begins with the new facts")
    except Exception as error:
        child.fatal("running", error)
    loop.close()


def _raise_priority() -> None:
    """Everybody waits for the core, and it needs little: let no tokenizer or kernel interrupt it.

    Where the system does not permit it, the core runs like any other process.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, CORE_NICENESS)


if __name__ == "__main__":
    main()
