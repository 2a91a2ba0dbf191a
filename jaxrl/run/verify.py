"""``python -m jaxrl.train --verify-resume``: that a run of this very configuration continues exactly.

Three runs in a temporary folder inside ``output_dir`` (and inside ``checkpoint.output_dir``): one goes
through, one is stopped inside its third step, and one continues that. Samples, metrics, parameters and
optimizer state after the last step have to be equal bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

from jaxrl.host import distributed
from jaxrl.record.metrics import METRICS_FILE, SAMPLES_FOLDER
from jaxrl.run import loop
from jaxrl.run.resume import check_folders
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import set_up
from jaxrl.store.checkpoint import Checkpoints
from jaxrl.store.folders import Folder

logger = logging.getLogger("jaxrl")

STEPS, INTERRUPTED_AFTER = 4, 2
_NOT_COMPARED = ("time", "time/", "throughput/", "memory/", "compile/", "environment/seconds")
"""Metrics that tell about the machine."""
_EVAL_ROWS = 8


class _StopAfter(threading.Event):
    """Set once the run has recorded a step: at its next safe point, or at the ``late``-th from there."""

    def __init__(self, run_dir: Path, step: int, late: int = 0):
        super().__init__()
        self._path, self._step, self._left = run_dir / METRICS_FILE, step, late

    def is_set(self) -> bool:
        reached = distributed.is_first() and any(s >= self._step for s in _steps(self._path))
        if reached:
            self._left -= 1
        return super().is_set() or (reached and self._left < 0)


def verify_resume(config: RunConfig) -> int:
    """Print a table of what was compared. Returns 0 when all is equal, else 1."""
    root = Path(config.output_dir).expanduser()
    made = None
    if distributed.is_first():
        check_folders(config)
        root.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix=f"{config.name}-verify-resume-", dir=root)
    folder = Path(distributed.broadcast(made))
    elsewhere = config.checkpoint.output_dir
    short = dataclasses.replace(
        set_up(config).config,  # one date for the chat template, even at midnight
        output_dir=str(folder),
        resume="auto",
        eval=dataclasses.replace(config.eval, limit=min(config.eval.limit or _EVAL_ROWS, _EVAL_ROWS)),
        checkpoint=dataclasses.replace(
            config.checkpoint,
            every=0,
            keep_last=STEPS,
            output_dir=elsewhere and f"{elsewhere.rstrip('/')}/{folder.name}",
        ),
        metrics=dataclasses.replace(
            config.metrics,
            tensorboard=False,
            wandb=None,
            progress="none",
            samples_per_step=10**9,
            sample_characters=10**9,
        ),
        profile=dataclasses.replace(config.profile, start_step=None),
    )
    straight, parts = (dataclasses.replace(short, name=name) for name in ("straight", "parts"))
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # summaries of runs that nobody asked for
            loop.run(straight, _StopAfter(straight.run_dir, STEPS))
            loop.run(parts, _StopAfter(parts.run_dir, INTERRUPTED_AFTER, late=1))
            loop.run(parts, _StopAfter(parts.run_dir, STEPS))
        distributed.barrier("trained")
        rows = compare(straight, parts)
    finally:
        distributed.barrier("compared")
        if distributed.is_first():
            shutil.rmtree(folder, ignore_errors=True)
            if short.checkpoint.output_dir and (there := Folder(short.checkpoint.output_dir)).exists():
                there.remove()
    different = [row for row in rows if row[2]]
    if distributed.is_first():
        print(f"\n{'compared':<12}{'':>34}  result")
        for what, how_much, first in rows:
            print(f"{what:<12}{how_much:>34}  {f'DIFFERENT: {first}' if first else 'identical'}")
        print("resume is exact" if not different else "resume is NOT exact for this configuration")
    return 1 if different else 0


def compare(straight: RunConfig, parts: RunConfig) -> list[tuple[str, str, str]]:
    """(what, how much, first difference or "") of two runs' samples, metrics and last checkpoints."""
    one, two = _steps(straight.run_dir / METRICS_FILE), _steps(parts.run_dir / METRICS_FILE)
    steps = f"{len(one)} steps"
    rows = [("steps", steps, "" if list(one) == list(two) else f"{list(one)} and {list(two)}")]
    files = [sorted((c.run_dir / SAMPLES_FOLDER).glob("*.jsonl")) for c in (straight, parts)]
    texts = [{p.name: p.read_text().splitlines() for p in found} for found in files]
    for what, keys in (("tokens", ("tokens", "completion")), ("rewards", ("reward", "rewards"))):
        a, b = (
            {
                f"{file} row {i}": [json.loads(line).get(key) for key in keys]
                for file, lines in found.items()
                for i, line in enumerate(lines)
            }
            for found in texts
        )
        if a or b:
            rows.append((what, f"{len(a)} samples of {steps}", _first_difference(a, b)))
    a, b = ({f"step {s} {k}": v for s, m in found.items() for k, v in m.items()} for found in (one, two))
    rows.append(("metrics", f"{len(a)} values of {steps}", _first_difference(a, b)))
    last = max(one, default=0)
    with (
        Checkpoints(straight.checkpoint_run, read_only=True) as first,
        Checkpoints(parts.checkpoint_run, read_only=True) as second,
    ):
        for what, item in (("parameters", "params"), ("optimizer", "optimizer")):
            count, size, difference = 0, 0, ""
            for (name, x), (_, y) in zip(first.arrays(last, item), second.arrays(last, item), strict=True):
                count, size = count + 1, size + x.nbytes
                if not difference and not (x.dtype == y.dtype and x.tobytes() == y.tobytes()):
                    difference = name
            rows.append((what, f"{count} arrays, {size / 1e6:,.1f} MB", difference))
    return rows


def _first_difference(a: dict[str, Any], b: dict[str, Any]) -> str:
    for name in [*a, *b]:
        if name not in a or name not in b or a[name] != b[name]:
            return f"{name}: {a.get(name)} and {b.get(name)}"
    return ""


def _steps(path: Path) -> dict[int, dict[str, Any]]:
    """Step -> its metrics, without those of the machine."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        if "event" not in record:
            found[record["step"]] = {k: v for k, v in record.items() if not k.startswith(_NOT_COMPARED)}
    return found
