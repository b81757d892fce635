"""The installed command `troika`: `serve`, `agent`, `run-batch`, `bench`, `status` and others."""

import difflib
import importlib
import signal
import sys

from protocol.process.version import version

_MODULES = {
    "serve": "supervisor.command",
    "agent": "agent",
    "run-batch": "batch.command",
    "bench": "bench.__main__",
    "status": "status",
    "restart": "restart",
    "keys": "keys",
}
_WATCHING = ("serve", "agent")
"""Commands that watch signals themselves once there is something to end."""
_USAGE = """usage: troika serve [MODEL] [flags]   start an engine; --help shows the flags
       troika agent --join HOST:PORT --curve-keys DIR
                                      run an engine here for one on another machine
       troika run-batch IN OUT [flags]
                                      answer a file of requests in OpenAI's batch format
       troika bench COMMAND [flags]   measure an engine, alone or beside other servers
       troika status [flags]          show the processes of a running engine
       troika restart ROLE [flags]    replace the api, core or worker of a running engine
       troika keys DIR NAME...        make keys for engines and clients on several machines
       troika COMMAND --help          show the flags of a command"""


def main() -> int:
    """Run a command. Returns its exit status, or 2 if it is unknown."""
    command, *argv = sys.argv[1:] or [""]
    if command in _MODULES:
        # Ctrl-C ends an import without a traceback; commands with work to end handle it later.
        handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
        module = importlib.import_module(f"scripts.{_MODULES[command]}")
        if command not in _WATCHING:
            signal.signal(signal.SIGINT, handler)
        return int(module.main(argv, f"troika {command}"))
    if command == "--version":
        print(f"troika {version()}")
        return 0
    if command in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    close = difflib.get_close_matches(command, _MODULES, n=1)
    what = f"unknown command {command}" if command else "a command is missing"
    question = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(_MODULES)}"
    print(f"troika: {what}{question}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
