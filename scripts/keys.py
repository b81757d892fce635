"""Make CURVE keys for links between machines: `troika keys DIR NAME...`.

DIR gets the pair of the engines, `server.key` and `server.secret`, and in DIR/clients a pair for
each client. Existing keys are kept.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from protocol.config.settings import OneLineParser
from protocol.transport.curve import make_keys

_ABOUT = (
    "Make the keys of links between machines. DIR gets the pair of the engines, server.key and "
    "server.secret, and DIR/clients a pair for each client. Existing keys are kept."
)


def main(argv: Sequence[str] | None = None, program: str = "python -m scripts.keys") -> int:
    """Make the keys that are missing, and print their files.

    Wrong arguments end the program with status 2, and a directory that cannot be used with 1.
    """
    parser = OneLineParser(program, description=_ABOUT)
    text = "directory of the keys, created if it does not exist"
    parser.add_argument("directory", metavar="DIR", type=Path, help=text)
    text = "a client: an API, an embedding program or a host agent"
    parser.add_argument("names", metavar="NAME", nargs="+", help=text)
    arguments = parser.parse_args(argv)
    try:
        written = make_keys(arguments.directory, arguments.names)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        print(f"troika: {error.filename} cannot be used: {error.strerror}", file=sys.stderr)
        return 1
    for path in written:
        print(path)
    if not written:
        print(f"{arguments.directory} has all of these keys already", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
