"""`python -m rlkit_placement`: see `rlkit_placement.process`."""

import sys

from rlkit.base.imports import import_lazily

if __name__ == "__main__":
    import_lazily()
    from rlkit_placement.process import main

    sys.exit(main(sys.argv[1:]))
