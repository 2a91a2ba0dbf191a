"""One self-contained HTML page of a run, or of several: ``python -m jaxrl.report RUN_DIR [RUN_DIR ...]``.

``run.py`` reads the folder of a run, ``plots.py`` says which plots there are, ``drawing.py`` draws them and
``page.py`` writes the page.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from jaxrl.record.report import drawing, page
from jaxrl.record.report.run import Run

REPORT_FILE = "report.html"


def write_report(
    run_dirs: str | os.PathLike | Sequence[str | os.PathLike],
    output: str | os.PathLike | None = None,
    *,
    png: str | os.PathLike | None = None,
) -> Path:
    """Writes the page and returns its path.

    Args:
        run_dirs: the folder of a run, or of several to compare.
        output: default: ``report.html`` in the run's folder; for several runs in the current folder.
        png: also write a picture of the main plots here.

    Raises:
        ConfigError: a run cannot be read.
    """
    single = isinstance(run_dirs, str | os.PathLike)
    folders = [Path(run_dirs)] if single else [Path(d) for d in run_dirs]  # type: ignore[arg-type, union-attr]
    runs = [Run(folder) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        for run in runs:
            run.name = str(run.path)
    curves = [dataclasses.replace(run.curves, name=run.name) for run in runs]
    path = Path(output) if output else (folders[0] / REPORT_FILE if len(runs) == 1 else Path(REPORT_FILE))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page.render(runs, curves), encoding="utf-8", errors="replace")
    os.replace(temporary, path)
    if png:
        Path(png).parent.mkdir(parents=True, exist_ok=True)
        Path(png).write_bytes(drawing.picture(curves))
    return path


def summary(run_dir: str | os.PathLike) -> str:
    """Facts that people ask about first, one a line: ``Held-out pass@1  14.4% → 82.6%  (+68.3 points)``.

    Raises:
        ConfigError: the run cannot be read.
    """
    found = page.facts(Run(run_dir))
    width = max(len(label) for label, _, _ in found)
    return "\n".join(f"{label:<{width}}  {value}  ({small})" for label, value, small in found)
