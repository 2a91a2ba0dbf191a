"""The folder of a run, read back: its curves, events, config and samples."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.config import ConfigError
from jaxrl.record.metrics import METRICS_FILE, parse_line

CONFIG_FILES = ("config.yaml", "config.json", "config.gin")
"""Where the resolved config of a run is looked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    """The metrics of one run."""

    name: str
    steps: np.ndarray
    """[n] step numbers, rising."""
    values: Mapping[str, np.ndarray]
    """Metric -> [n] float64, NaN where a step has none."""
    resumed: Sequence[int] = ()
    """Steps after which a new segment began."""

    def scaled(self, factor: float) -> Curves:
        """All values times ``factor``, for another unit."""
        return dataclasses.replace(self, values={name: v * factor for name, v in self.values.items()})

    def get(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values) where the metric was measured; both empty if it never was."""
        values = self.values.get(metric)
        if values is None:
            return np.zeros(0), np.zeros(0)
        found = np.isfinite(values)
        return self.steps[found], values[found]


class Run:
    """The folder of a run.

    Raises:
        ConfigError: there is no metrics file, it holds no step, or a line but the last is not JSON object.
    """

    def __init__(self, run_dir: str | os.PathLike):
        self.path = Path(run_dir)
        self.name = self.path.resolve().name
        steps, self.events = _read_metrics(self.path / METRICS_FILE)
        numbers = sorted(steps)
        names = sorted({name for record in steps.values() for name in record})
        values = {name: np.array([_float(steps[s].get(name)) for s in numbers], np.float64) for name in names}
        self.times = values.pop("time", np.full(len(numbers), np.nan))
        resumed = [int(e.get("step", 0)) for e in self.events if e["event"] == "resume"]
        self.curves = Curves(name=self.name, steps=np.array(numbers), values=values, resumed=resumed)
        self.config_file = next((f for name in CONFIG_FILES if (f := self.path / name).is_file()), None)
        starts = [e for e in self.events if e["event"] in ("start", "resume") and "versions" in e]
        self.environment: dict[str, Any] = starts[-1] if starts else {}

    def first_last(self, metric: str) -> tuple[float, float] | None:
        """The metric at the start and at the end: means over a tenth of the steps; single evaluations."""
        _, values = self.curves.get(metric)
        if not values.size:
            return None
        count = 1 if metric.startswith("eval/") else max(1, len(values) // 10)
        return float(values[:count].mean()), float(values[-count:].mean())

    def seconds(self) -> float:
        """Time spent in steps, without the time between segments."""
        _, values = self.curves.get("time/step_seconds")
        return float(values.sum()) if values.size else float(np.nanmax(self.times) - np.nanmin(self.times))

    def tokens(self, phase: str = "rollout") -> float:
        """Tokens that a phase worked on in the whole run (its seconds times its tokens per second)."""
        seconds = self.curves.values.get(f"time/{phase}_seconds")
        rate = self.curves.values.get(f"throughput/{phase}_tokens_per_second")
        return 0.0 if seconds is None or rate is None else float(np.nansum(seconds * rate))


def _float(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _read_metrics(path: Path) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """(step -> metrics, events). A torn last line is left out: the run may be writing it right now."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; expected the folder of a run that has begun")
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")
    steps: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        record = parse_line(line)
        if record is None:
            if number == len(lines):
                break
            raise ConfigError(
                f"{path}: line {number} is not a JSON object with a step or an event: {line[:80]!r}"
            )
        if "event" in record:
            events.append(record)
        else:
            steps.setdefault(int(record.pop("step")), {}).update(record)
    if not steps:
        what = "is empty" if not any(line.strip() for line in lines) else "holds no complete step"
        raise ConfigError(f"{path}: the file {what}; expected a run that has finished at least one step")
    return steps, events


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of samples; torn ones are left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
