"""`python -m rlkit`."""

import sys

from rlkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
