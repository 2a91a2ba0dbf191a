"""The record of a run: metrics, samples, phase timings, memory, compilations, profiler traces.

Metric names are slash-separated and carry their unit (``reward/mean``, ``time/rollout_seconds``).
``metrics.jsonl`` is the record. Each line is one JSON object: a step, ``{"step": 3, "time": 1730000000.0,
"reward/mean": 0.5}``, or an event, ``{"event": "resume", "step": 2, "time": ...}``; times are unix seconds.
TensorBoard, W&B and Prometheus get the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import logging
import math
import numbers
import os
import platform
import re
import resource
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.monitoring

from jaxrl.config import ConfigError, setting
from jaxrl.record.prometheus import PrometheusEndpoint
from jaxrl.store.folders import Folder

logger = logging.getLogger("jaxrl")

METRICS_FILE = "metrics.jsonl"
SAMPLES_FOLDER = "samples"
TENSORBOARD_FOLDER = "tensorboard"
PROFILE_FOLDER = "profile"
WANDB_ID_FILE = "wandb_id"
_PACKAGES = ("jaxrl", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
_OWN = (METRICS_FILE, SAMPLES_FOLDER, TENSORBOARD_FOLDER, PROFILE_FOLDER, WANDB_ID_FILE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Where metrics and samples go besides ``metrics.jsonl``, and how progress is shown."""

    tensorboard: bool = setting(True, "also write TensorBoard event files to <run>/tensorboard")
    wandb: str | None = setting(None, "also log to this Weights & Biases project (needs the extra `wandb`)")
    prometheus_port: int | None = setting(
        None,
        "serve the latest metrics at http://<host>:<port>/metrics for Prometheus (the first process alone); "
        "0: any free port, which the log names; null: off",
    )
    prometheus_host: str = setting(
        "127.0.0.1",
        "address that prometheus_port listens on; 127.0.0.1: this machine alone; 0.0.0.0: every interface, "
        "as a Prometheus elsewhere needs it",
    )
    samples_per_step: int = setting(16, "completions of each step kept in <run>/samples; 0: none")
    sample_characters: int = setting(
        8000, "characters kept of a sample's text; longer ones lose their middle"
    )
    samples_keep_steps: int = setting(200, "steps whose samples stay on disk; older ones thin out evenly")
    compilations: Literal["count", "error"] = setting(
        "count",
        "a program that is compiled after the first whole step is counted (compile/count), or ends the run "
        "with an error that names it and its shapes; what saving a checkpoint compiles is only counted",
    )
    progress: Literal["auto", "rich", "plain", "none"] = setting(
        "auto", "rich: a live line; plain: one line a step; auto: rich on a terminal, else plain"
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.prometheus_port is not None and not 0 <= self.prometheus_port < 2**16:
            yield "prometheus_port", f"{self.prometheus_port}: needs a port from 0 to 65535, or null"
        if not self.prometheus_host.strip():
            yield "prometheus_host", "empty; needs an address, 0.0.0.0 for every interface"
        if self.samples_per_step < 0:
            yield "samples_per_step", f"{self.samples_per_step}: needs 0 (no samples) or a number of rows"
        if self.sample_characters < 100:
            yield "sample_characters", f"{self.sample_characters}: needs at least 100 characters"
        if self.samples_keep_steps < 2:
            yield "samples_keep_steps", f"{self.samples_keep_steps}: needs at least 2 (first and latest)"
        if self.wandb is not None and not self.wandb.strip():
            yield "wandb", "an empty project name; needs a name, or null for no Weights & Biases"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """When to write a JAX profiler trace (TensorBoard's profile plugin, xprof or Perfetto read it)."""

    start_step: int | None = setting(None, "first step of the trace in <run>/profile; null: no trace")
    num_steps: int = setting(3, "steps in the trace")

    def problems(self) -> Iterable[tuple[str, str]]:
        if self.start_step is not None and self.start_step < 0:
            yield "start_step", f"{self.start_step}: needs a step number, or null for no trace"
        if self.num_steps < 1:
            yield "num_steps", f"{self.num_steps}: needs at least 1 step"


def environment() -> dict[str, Any]:
    """The machine: ``versions`` by package, ``devices`` ("4 x TPU v5 lite"), ``processes``, ``system``."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    device = jax.devices()[0]
    devices = f"{jax.device_count()} x {device.device_kind}"
    return {
        "versions": versions,
        "devices": devices,
        "processes": jax.process_count(),
        "system": platform.platform(),
    }


def parse_line(line: str) -> dict[str, Any] | None:
    """One line of ``metrics.jsonl``; None when it is torn (the process died while writing it)."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    known = isinstance(record, dict) and ("step" in record or "event" in record)
    return record if known and isinstance(record.get("step", 0), int) else None


def _rewind(path: Path, step: int, pending: bool) -> None:
    """Cut what an interrupted segment wrote after ``step`` (of ``pending`` steps the metrics too), and torn
    lines; replaces the file at once."""
    if not path.exists():
        return
    fresh = path.with_suffix(".tmp")
    with path.open(encoding="utf-8", errors="replace") as old, fresh.open("w", encoding="utf-8") as new:
        for number, line in enumerate(old, 1):
            record = parse_line(line)
            if record is None:
                logger.warning("%s: line %d is torn and was dropped", path, number)
            elif record.get("step", 0) <= step - (pending and "event" not in record):
                new.write(line if line.endswith("\n") else line + "\n")
        new.flush()
        os.fsync(new.fileno())
    os.replace(fresh, path)


def _set_aside(run_dir: Path) -> None:
    """Moves what an earlier run left here to ``<name>.old``: a new run does not mix with it."""
    for name in _OWN:
        path, old = run_dir / name, run_dir / f"{name}.old"
        if path.exists():
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
            path.rename(old)
            logger.warning("%s is of an earlier run in this folder; it is now %s", path, old.name)


def _number(name: str, value: Any) -> int | float | None:
    """A JSON number; None (null) for NaN and infinities, which JSON does not have."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool | numbers.Integral):
        return int(value)
    if not isinstance(value, numbers.Real):
        raise TypeError(f"metric {name!r} is {value!r}; a number is needed")
    return float(value) if math.isfinite(value) else None


def _bounded(value: Any, characters: int) -> Any:
    """``value`` as JSON can hold it: texts cut in the middle, lists at the end, NaN as null."""
    value = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(value, str):
        if len(value) <= characters:
            return value
        half = characters // 2
        return f"{value[:half]} [... {len(value) - 2 * half} characters cut ...] {value[-half:]}"
    if isinstance(value, Mapping):
        return {str(k): _bounded(v, characters) for k, v in value.items()}
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Iterable):
        return [_bounded(v, characters) for v in itertools.islice(value, characters // 4)]
    return _bounded(repr(value), characters)


def sample_files(run_dir: Path) -> dict[int, Path]:
    """Step -> its file of samples, in order."""
    paths = (run_dir / SAMPLES_FOLDER).glob("step_*.jsonl")
    found = [(re.fullmatch(r"step_(\d+)\.jsonl", path.name), path) for path in paths]
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def _step_to_drop(steps: list[int]) -> int:
    """The step of the older half (never the first) that leaves the smallest gap."""
    older = range(1, max(2, len(steps) // 2))
    return steps[min(older, key=lambda i: steps[i + 1] - steps[i - 1])]


class MetricsWriter:
    """Writes the metrics and samples of one run. In a job of several processes only the first is ``enabled``.

    Args:
        run_dir: the run's folder; it is made.
        config: where metrics go.
        resume_step: the last step that the restored checkpoint has seen; later lines, samples and TensorBoard
            points of the interrupted segment are cut, so that every step occurs once. None: a new run; what
            an earlier run left here is set aside as ``*.old``.
        pending: the metrics of ``resume_step`` itself are logged again: its evaluation was not done when the
            checkpoint was written.
        enabled: False makes every method do nothing.
        run_config: the resolved config, shown by W&B.

    Raises:
        ConfigError: ``metrics.wandb`` is set and the package is missing, or ``metrics.prometheus_port`` is
            taken.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike,
        config: MetricsConfig,
        *,
        resume_step: int | None = None,
        pending: bool = False,
        enabled: bool = True,
        run_config: Mapping[str, Any] | None = None,
    ):
        self.run_dir = Path(run_dir)
        self.config = config
        self.enabled = enabled
        self._last_step = -1 if resume_step is None else resume_step
        self._file: Any = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._prometheus: PrometheusEndpoint | None = None
        if not enabled:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if config.wandb:
            _import_wandb(config.wandb)  # before any file is touched
        if config.prometheus_port is not None:
            name = self.run_dir.resolve().name
            self._prometheus = PrometheusEndpoint(config.prometheus_port, name, config.prometheus_host)
        if resume_step is None:
            _set_aside(self.run_dir)
        else:
            _rewind(self.run_dir / METRICS_FILE, resume_step, pending)
            for step, path in sample_files(self.run_dir).items():
                if step > resume_step:
                    path.unlink()
        self._file = (self.run_dir / METRICS_FILE).open("a", encoding="utf-8")
        if config.tensorboard:
            from tensorboardX import SummaryWriter  # type: ignore[import-untyped]

            purge_step = None if resume_step is None else resume_step + (not pending)
            folder = str(self.run_dir / TENSORBOARD_FOLDER)
            # The suffix keeps two segments of the same second apart.
            suffix = f".{resume_step or 0}"
            self._tensorboard = SummaryWriter(
                folder, purge_step=purge_step, flush_secs=10, filename_suffix=suffix
            )
        if config.wandb:
            self._wandb = _start_wandb(self.run_dir, config.wandb, run_config)
        self.event("start" if resume_step is None else "resume", step=resume_step or 0, **environment())

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line: the numbers of ``step`` by name. NaN and infinities become null.

        Raises:
            TypeError: a value is no number.
            ValueError: ``step`` is smaller than the last one.
        """
        if not self.enabled:
            return
        if step < self._last_step:
            raise ValueError(f"step {step} logged after step {self._last_step}; steps only go up")
        self._last_step = step
        values = {name: _number(name, metrics[name]) for name in sorted(metrics)}
        self._write({"step": step, "time": round(time.time(), 3), **values})
        finite = {name: value for name, value in values.items() if value is not None}
        if self._tensorboard:
            for name, value in finite.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb:
            self._wandb.log({"step": step, **finite})
        if self._prometheus:
            self._prometheus.log(step, values)

    def event(self, kind: str, **fields: Any) -> None:
        """One line about something that happened, e.g. ``event("checkpoint", step=40, path="...")``."""
        if self.enabled:
            fields = _bounded(fields, self.config.sample_characters)
            self._write({"event": kind, "time": round(time.time(), 3), **fields})

    def samples(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """The first rows of a step to ``samples/step_000010.jsonl``.

        Args:
            step: the step that sampled them.
            rows: one dict a completion, those of a prompt next to each other: ``prompt``, ``completion``,
                ``answer`` (parsed, or None), ``reward`` (total), ``rewards`` (by name), ``stop_reason``,
                ``length`` (tokens), and what else helps to read it.
        """
        if not self.enabled or not self.config.samples_per_step:
            return
        folder = self.run_dir / SAMPLES_FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / f"step_{step:06d}.jsonl"
        kept = itertools.islice(rows, self.config.samples_per_step)
        plain = [_bounded(row, self.config.sample_characters) for row in kept]
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in plain)
        path.with_suffix(".tmp").write_text(text, encoding="utf-8", errors="replace")
        os.replace(path.with_suffix(".tmp"), path)
        files = sample_files(self.run_dir)
        while len(files) > self.config.samples_keep_steps:
            files.pop(_step_to_drop(list(files))).unlink()

    def sync(self) -> None:
        """Force the metrics to disk: a checkpoint that knows a step is not to outlive its line."""
        if self._file:
            os.fsync(self._file.fileno())

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flushes and closes everything; more than once is fine. What cannot be flushed is a warning: a run
        that has come to its end has succeeded."""
        for part in (self._file, self._tensorboard, self._wandb, self._prometheus):
            try:
                if part:
                    (part.finish if part is self._wandb else part.close)()
            except Exception as error:
                logger.warning("%s: %s: %s", self.run_dir, type(error).__name__, error)
        self.enabled, self._file, self._tensorboard, self._wandb = False, None, None, None
        self._prometheus = None

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _import_wandb(project: str) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"{project!r} asks for Weights & Biases, but the package wandb cannot be imported ({error}): "
            "pip install 'jaxrl[wandb]', or set metrics.wandb=null",
            key="metrics.wandb",
        ) from error
    return wandb


def _start_wandb(run_dir: Path, project: str, run_config: Mapping[str, Any] | None) -> Any:
    """Starts or resumes the W&B run whose id is kept in the run's folder.

    W&B refuses steps that go back, as a resumed run's do: so our step is a metric and their axis.
    """
    id_file = run_dir / WANDB_ID_FILE
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:12])
    run = _import_wandb(project).init(
        project=project,
        name=run_dir.resolve().name,
        id=id_file.read_text().strip(),
        resume="allow",
        dir=str(run_dir),
        config=dict(run_config or {}),
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


@dataclasses.dataclass
class Phase:
    """A phase that ``PhaseTimer.phase`` hands out; set ``tokens`` inside the block to get a throughput."""

    tokens: int = 0


class PhaseTimer:
    """Seconds and tokens of each phase of a step.

    JAX returns before the device is done: a phase must end with what waits for its result (reading
    a metric, ``jax.block_until_ready``), or its seconds land in the next phase.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """``with timer.phase("rollout") as p: ...; p.tokens = n``. Entered again in a step, it adds up."""
        phase = Phase()
        start = time.perf_counter()
        try:
            with jax.profiler.TraceAnnotation(name):
                yield phase
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
            self._tokens[name] = self._tokens.get(name, 0) + phase.tokens

    def metrics(self) -> dict[str, float]:
        """time/<phase>_seconds and throughput/<phase>_tokens_per_second since the last call.

        ``time/step_seconds`` is all the time since the last call (at first: since the timer was made).
        """
        now = time.perf_counter()
        found = {f"time/{name}_seconds": seconds for name, seconds in self._seconds.items()}
        found["time/step_seconds"] = now - self._since
        for name, tokens in self._tokens.items():
            if tokens and self._seconds[name] > 0:
                found[f"throughput/{name}_tokens_per_second"] = tokens / self._seconds[name]
        self._seconds, self._tokens, self._since = {}, {}, now
        return found


def memory_metrics() -> dict[str, int]:
    """Bytes this process holds.

    memory/peak_bytes: the most that one local device ever held; where devices do not tell (CPU), the process.
    memory/host_bytes: resident memory of the process now.
    memory/live_bytes: all arrays alive in JAX, a sharded or replicated one counted once.
    """
    peaks = [_memory_stats(device).get("peak_bytes_in_use") for device in jax.local_devices()]
    host_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc (macOS): the peak is the best there is without another package
        resident = host_peak
    return {
        "memory/peak_bytes": max((p for p in peaks if p is not None), default=host_peak),
        "memory/host_bytes": resident,
        "memory/live_bytes": sum(array.nbytes for array in jax.live_arrays()),
    }


def _memory_stats(device: jax.Device) -> dict[str, Any]:
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # not asked for through a proxy (Pathways)
        return {}


class Profiler:
    """Traces steps [start_step, start_step + num_steps) to <run>/profile; in a bucket where JAX can."""

    def __init__(self, run_dir: str | os.PathLike, config: ProfileConfig):
        self._folder = Folder(run_dir) / PROFILE_FOLDER
        self._config = config
        self._tracing = False

    def step(self, step: int) -> None:
        """To be called at the start of each step; starts or ends the trace when it is time."""
        first = self._config.start_step
        inside = first is not None and first <= step < first + self._config.num_steps
        if inside and not self._tracing:
            self._folder.make()
            jax.profiler.start_trace(self._folder.path)
            self._tracing = True
        elif not inside:
            self.close()

    def close(self) -> None:
        """Ends a trace that is still open."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
            logger.info("profiler trace written to %s", self._folder)
