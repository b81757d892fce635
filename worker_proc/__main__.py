"""The worker process: `python -m worker_proc --run-dir DIR`, or started by a supervisor.

With `--standby` it loads the model and waits until it is promoted, because the worker has died.
With `--zygote` it loads the model and forks workers, and computes nothing itself (zygote.py).
"""

import sys

from protocol.lifecycle import Role
from protocol.process.child_runtime import ChildProcess
from worker_proc.runner import ReportProgress, Runner
from worker_proc.startup.cpu_pinning import pin_worker
from worker_proc.startup.start import make_runner, work

_STANDBY_FLAG = "--standby"


def main() -> None:
    """Load the model, then compute until the supervisor sends Stop; a standby once promoted."""
    if "--zygote" in sys.argv:
        from worker_proc.startup import zygote

        zygote.main(sys.argv[1:])
        return
    argv = [argument for argument in sys.argv[1:] if argument != _STANDBY_FLAG]
    child = ChildProcess.from_argv("worker_proc", Role.WORKER, argv)

    def make(progress: ReportProgress) -> Runner:
        pin_worker(child.config, child.rank)
        return make_runner(child.config, progress, child.rank)

    work(child, make, is_standby=_STANDBY_FLAG in sys.argv)


if __name__ == "__main__":
    main()
