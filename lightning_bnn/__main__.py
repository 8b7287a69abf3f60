"""``python -m lightning_bnn``: the same as ``lightning-bnn``."""

import sys

from lightning_bnn.cli import main

if __name__ == "__main__":
    sys.exit(main())
