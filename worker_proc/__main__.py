"""The worker process: `python -m worker_proc --run-dir DIR`, or started by a supervisor.

With `--zygote` it loads the model and forks workers, and computes nothing itself (zygote.py).
"""

import sys

from protocol.lifecycle import Role
from protocol.process.child_runtime import ChildProcess
from worker_proc.startup.start import make_runner, work


def main() -> None:
    """Load the model, then compute until the supervisor sends Stop."""
    if "--zygote" in sys.argv:
        from worker_proc.startup import zygote

        zygote.main(sys.argv[1:])
        return
    child = ChildProcess.from_argv("worker_proc", Role.WORKER, sys.argv[1:])
    work(child, lambda progress: make_runner(child.config, progress))


if __name__ == "__main__":
    main()
