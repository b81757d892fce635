"""The supervisor: `python -m scripts.supervisor [MODEL] [flags]` starts an engine and keeps it."""

import signal
import sys


def _main() -> int:
    # Until the signals are watched, Ctrl-C ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from scripts.supervisor.command import main

    return main()


if __name__ == "__main__":
    sys.exit(_main())
