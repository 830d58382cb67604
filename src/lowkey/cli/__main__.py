"""`python -m lowkey.cli` is `lowkey`."""

from __future__ import annotations

import sys

from lowkey.cli import main

if __name__ == "__main__":
    sys.exit(main())
