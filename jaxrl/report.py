"""One self-contained HTML page of a run, or of several: ``python -m jaxrl.report RUN_DIR [RUN_DIR ...]``.

``run.py`` reads the folder of a run, ``plots.py`` says which plots there are, ``drawing.py`` draws them and
``page.py`` writes the page.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxrl.config import Parser, given_file, given_path, run_cli
from jaxrl.record.report import write_report


def main(arguments: Sequence[str]) -> int:
    """The command line."""
    description = "One self-contained HTML page of a run, with plots; several runs are drawn together."
    parser = Parser(prog="python -m jaxrl.report", description=description)
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="RUN_DIR", type=given_path, help="the folder of a run")
    where = "the page; default: RUN_DIR/report.html, or report.html here for several runs"
    add("--output", metavar="FILE", type=given_file, help=where)
    add("--png", metavar="FILE", type=given_file, help="also write a picture of the main plots")
    given = parser.parse_intermixed_args(arguments)
    print(write_report(given.run_dirs, given.output, png=given.png))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
