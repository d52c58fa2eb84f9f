"""`python -m kvcellar.cli`: the command `kvcellar` where its script is not on the path."""

import sys

from kvcellar.cli import main

if __name__ == "__main__":
    sys.exit(main())
