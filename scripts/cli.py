"""The installed command: `troika serve [MODEL] [flags]`, `troika status` and `troika restart`."""

import importlib
import sys

_MODULES = {"serve": "supervisor.__main__", "status": "status", "restart": "restart"}
_USAGE = """usage: troika serve [MODEL] [flags]   start an engine; --help shows all flags
       troika status [flags]          show the processes of a running engine
       troika restart ROLE [flags]    replace the api, core or worker of a running engine"""


def main() -> int:
    """Run a command. Returns its exit status, or 2 if it is unknown."""
    command, *argv = sys.argv[1:] or [""]
    if command in _MODULES:
        module = importlib.import_module(f"scripts.{_MODULES[command]}")
        return int(module.main(argv, f"troika {command}"))
    is_asked = command in ("-h", "--help")
    print(_USAGE, file=sys.stdout if is_asked else sys.stderr)
    return 0 if is_asked else 2


if __name__ == "__main__":
    sys.exit(main())
