"""Verify families and print their rows of a table: `python -m tests.families [NAME ...]`.

`--write` puts the rows into docs/families.md. A family takes about ten seconds.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from transformers.utils import logging as transformers_logging

from scripts.testing import EngineFactory
from tests.families.configs import FAMILIES
from tests.families.table import PAGE, header, row, with_rows
from tests.families.verification import verify


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.families",
        description="Compares the tokens of served models with transformers', family by family.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="families (default: all)")
    parser.add_argument("--write", action="store_true", help="put the rows into docs/families.md")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(FAMILIES):
        parser.error(f"no family is called {', '.join(sorted(unknown))}")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    print(*header(), sep="\n", flush=True)
    all_equal = True
    for name in arguments.names or sorted(FAMILIES):
        with tempfile.TemporaryDirectory() as directory, EngineFactory() as start_engine:
            verified = verify(FAMILIES[name], Path(directory), start_engine)
        all_equal &= all(verified.equal)
        line = row(name, verified)
        print(line, flush=True)
        if arguments.write:
            PAGE.write_text(with_rows(PAGE.read_text(), {name: line}))
    sys.exit(0 if all_equal else 1)


if __name__ == "__main__":
    main()
