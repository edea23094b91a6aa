"""`python -m ckptfs` is the command line."""

import sys

from ckptfs.cli import main

if __name__ == "__main__":
    sys.exit(main())
