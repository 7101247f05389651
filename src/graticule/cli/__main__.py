"""`python -m graticule.cli`."""

import sys

from graticule.cli import main

if __name__ == "__main__":
    sys.exit(main())
