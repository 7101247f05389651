"""`python -m graticule`, and `torchrun --nproc-per-node 4 -m graticule train ...`."""

import sys

from graticule.cli import main

if __name__ == "__main__":
    sys.exit(main())
