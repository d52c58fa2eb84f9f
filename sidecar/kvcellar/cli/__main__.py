"""`python -m kvcellar.cli`: the command `kvcellar`."""

import sys

from kvcellar.cli import main

if __name__ == "__main__":
    sys.exit(main())
