"""``python -m jaxrl.report``."""

import sys

from jaxrl.config import run_cli
from jaxrl.report import main

if __name__ == "__main__":
    sys.exit(run_cli(main))
