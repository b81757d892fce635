"""The former name of `scripts.bench.scheduler`."""

import sys

from scripts.bench.scheduler import main

if __name__ == "__main__":
    sys.exit(main())
