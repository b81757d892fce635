"""The installed command: `troika serve [MODEL] [flags]`, `troika status` and `troika restart`."""

import sys

_USAGE = """usage: troika serve [MODEL] [flags]   start an engine; --help shows all flags
       troika status [flags]          show the processes of a running engine
       troika restart ROLE [flags]    replace the api, core or worker of a running engine"""


def main() -> int:
    """Run a command. Returns its exit status, or 2 if it is unknown."""
    command, *argv = sys.argv[1:] or [""]
    if command == "serve":
        from scripts.supervisor import __main__ as supervisor

        return supervisor.main(argv, "troika serve")
    if command == "status":
        from scripts import status

        return status.main(argv, "troika status")
    if command == "restart":
        from scripts import restart

        return restart.main(argv, "troika restart")
    is_asked = command in ("-h", "--help")
    print(_USAGE, file=sys.stdout if is_asked else sys.stderr)
    return 0 if is_asked else 2


if __name__ == "__main__":
    sys.exit(main())
