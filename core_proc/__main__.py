"""The core process: `python -m core_proc --run-dir DIR`, or started by a supervisor.

With `--standby` it imports everything and waits until it is promoted, because the core has died.
"""

import contextlib
import os
import sys
import time

import zmq

from core_proc.engine import EngineCore, FactsChanged
from core_proc.loop import CoreLoop
from protocol.lifecycle import Role
from protocol.process import gc_tuning
from protocol.process.child_runtime import ChildProcess
from protocol.process.failpoints import failpoint
from protocol.transport.runtime import SystemProcesses

CORE_NICENESS = -10
_STANDBY_FLAG = "--standby"


def main() -> None:
    """Serve until the supervisor sends Stop; a standby from its promotion on."""
    argv = [argument for argument in sys.argv[1:] if argument != _STANDBY_FLAG]
    child = ChildProcess.from_argv("core_proc", Role.CORE, argv)
    if _STANDBY_FLAG in sys.argv and not _stand_by(child):
        return
    failpoint("core.load")
    _raise_priority()
    child.restart_on_sigterm()
    loop = CoreLoop(
        child,
        EngineCore(child.config),
        clock=time,
        poller=zmq.Poller(),
        processes=SystemProcesses(),
    )
    child.ready()
    try:
        loop.run()
    except FactsChanged as error:
        child.fatal("adopting workers", error, "a new core begins with the new facts")
    except Exception as error:
        child.fatal("running", error)
    child.leave()


def _stand_by(child: ChildProcess) -> bool:
    """Wait for the promotion. The sockets still belong to the core, so nothing is bound here."""
    gc_tuning.freeze()  # now, while no request waits
    child.ready()
    return child.wait_for_promotion()


def _raise_priority() -> None:
    """Run at a higher priority than tokenizers and kernels, if that is permitted."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, CORE_NICENESS)


if __name__ == "__main__":
    main()
