"""python -m hobbit_cpp: the same as the command hobbit."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
