"""``python -m lowbit`` is the command ``lowbit``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
