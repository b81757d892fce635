"""Make CURVE keys for links between machines: `troika keys DIR NAME...`.

DIR gets the pair of the engines, `server.key` and `server.secret`, and in DIR/clients a pair for
each client. Keys that are there stay as they are.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.transport.curve import make_keys


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Make the keys that are missing, and print the files; wrong arguments end with status 2."""
    parser = argparse.ArgumentParser(program, description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("directory", metavar="DIR", type=Path)
    parser.add_argument("names", metavar="NAME", nargs="+", help="a client")
    arguments = parser.parse_args(argv)
    try:
        written = make_keys(arguments.directory, arguments.names)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
