"""The former name of `python -m scripts.bench scheduler`."""

import sys

from scripts.bench.commands.scheduler import main

if __name__ == "__main__":
    sys.exit(main())
