"""``python -m jaxrl.report``."""

import sys

from jaxrl.report import main

if __name__ == "__main__":
    sys.exit(main())
