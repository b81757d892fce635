"""The worker process: `python -m worker_proc --run-dir DIR`, or started by a supervisor.

With `--zygote` it computes nothing, but loads what workers share and forks them (zygote.py).
"""

import sys

from protocol.child_runtime import ChildProcess
from protocol.lifecycle import Role
from worker_proc.start import make_runner, work


def main() -> None:
    """Load, then compute until told to stop."""
    if "--zygote" in sys.argv:
        from worker_proc import zygote

        zygote.main(sys.argv[1:])
        return
    child = ChildProcess.from_argv("worker_proc", Role.WORKER, sys.argv[1:])
    work(child, lambda progress: make_runner(child.config, progress))


if __name__ == "__main__":
    main()
