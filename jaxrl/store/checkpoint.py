"""Checkpoints: Orbax's CheckpointManager around (parameters, optimizer, meta), on a file system or in a
bucket.

``<run>/checkpoints/<step>/`` holds three items: ``params`` and ``optimizer`` (OCDBT/zarr3 arrays,
sharded: every host writes its own part) and ``meta`` (JSON: data position, cursor of the metrics,
resolved config, versions). Randomness needs no state: every number is a function of (seed, stream, prompt,
sample, position). There is no pickle anywhere.

A checkpoint is complete when ``complete.json``, written last, names its files and each has the size it
says. What is incomplete is never chosen, whatever damaged it; see docs/checkpoints.md.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxrl.config import ConfigError, RunError, setting
from jaxrl.host import distributed, pathways
from jaxrl.store import strict_json
from jaxrl.store.folders import Folder, is_remote
from jaxrl.types import TrainState

logger = logging.getLogger("jaxrl")

RECORD = "complete.json"
_FINAL_FILES = ("_CHECKPOINT_METADATA", "commit_success.txt")
"""Orbax writes them after the record, so that their sizes are not known to it."""
_TEMPORARY = ".orbax-checkpoint-tmp"
_WRITE_SECONDS = 4 * 3600
"""Longest that writing may take before Orbax gives up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, where, and which stay. The newest always stays."""

    every: int = setting(50, "steps between checkpoints; 0: only at the end")
    keep_last: int = setting(2, "newest checkpoints that stay")
    keep_every: int | None = setting(None, "checkpoints at multiples of this many steps stay for good")
    keep_best: int = setting(0, "best checkpoints that stay, by best_metric")
    best_metric: str = setting(
        "eval/pass_at_1", "logged metric that ranks checkpoints for keep_best (its latest value counts)"
    )
    best_mode: Literal["max", "min"] = setting("max", "whether more or less of best_metric is better")
    asynchronous: bool = setting(True, "write in the background while the next step runs")
    output_dir: str | None = setting(
        None, "as output_dir, for the checkpoints alone; may be gs://bucket/path. null: the same", path=True
    )
    grace_seconds: float | None = setting(
        300.0,
        "from SIGTERM or SIGINT on, time to reach a checkpoint; then the run ends without a new one (exit "
        "code 76). To be less than the platform's own grace; null: no limit",
    )
    concurrent_gb: int | None = setting(
        None, "GB that a host has on its way to or from storage at once; null: 96, Orbax's own"
    )
    file_mb: int | None = setting(
        None, "target size of a data file (MB); null: Orbax's own, 2048 on file systems and 400 in buckets"
    )
    compress: bool = setting(
        False, "zstd: about 10 % less of float32 weights, at a fifth of the speed of a fast disk"
    )

    def problems(self) -> Iterable[tuple[str, str]]:
        for key, least in (("every", 0), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, key) < least:
                yield key, f"{getattr(self, key)}: needs {least} or more"
        if self.keep_every is not None and self.keep_every < 1:
            yield "keep_every", f"{self.keep_every}: needs a positive number of steps, or null"
        if self.grace_seconds is not None and not self.grace_seconds > 0:
            yield "grace_seconds", f"{self.grace_seconds}: needs a positive number of seconds, or null"
        for key in ("concurrent_gb", "file_mb"):
            value = getattr(self, key)
            if value is not None and value < 1:
                yield key, f"{value}: needs 1 or more, or null"
        if self.output_dir is not None and "://" in self.output_dir and not is_remote(self.output_dir):
            yield "output_dir", f"{self.output_dir!r}: needs a folder or gs://bucket/path"


class SaveError(RunError):
    """A checkpoint could not be written. The older ones are all still there."""


class Checkpoints:
    """The checkpoints of one run.

    ``save`` returns once the arrays are copied off the device; an error of an earlier background write is
    raised by the next ``save`` or by ``close``.

    Args:
        run_dir: the run's folder, local or ``gs://...``.
        config: what to keep, and how to write.
        read_only: the folder must exist; nothing in it is changed.

    Raises:
        ConfigError: the folder is missing (``read_only``) or cannot be used.
    """

    def __init__(
        self, run_dir: str | os.PathLike, config: CheckpointConfig | None = None, *, read_only: bool = False
    ):
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as policies

        # Its warnings are about what we ask for.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.config = config or CheckpointConfig()
        self.run = Folder(run_dir if is_remote(run_dir) else Path(run_dir).expanduser().resolve())
        self.directory = self.run / "checkpoints"
        self._ocp, self._read_only = ocp, read_only
        self._writing: tuple[int, dict[str, float]] = (0, {})
        self._finisher: threading.Thread | None = None
        self._failed = False
        self._metrics = self._open()
        self._manager = ocp.CheckpointManager(
            self.directory.path,
            options=ocp.CheckpointManagerOptions(
                # Retention is ours, see ``_prune``: an error in it must not end a run.
                preservation_policy=policies.LatestN(None),
                async_options=ocp.options.AsyncOptions(
                    timeout_secs=_WRITE_SECONDS,
                    post_finalization_callback=self._record,
                    # A folder that cannot be made is then an error at once; the writers would wait for it.
                    create_directories_asynchronously=False,
                ),
                read_only=read_only,
                create=not read_only,
            ),
            item_handlers={
                "params": self._handler(),
                "optimizer": self._handler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )

    def _handler(self) -> Any:
        limit = self.config.concurrent_gb
        ours = not pathways.workers_write_checkpoints()  # they have a format of their own
        return self._ocp.PyTreeCheckpointHandler(
            save_concurrent_gb=limit,
            restore_concurrent_gb=limit,
            use_ocdbt=ours,
            use_zarr3=ours,
            use_compression=self.config.compress,
        )

    def _open(self) -> dict[int, dict[str, float]]:
        """The complete checkpoints as the first process finds them; left-overs of interrupted writes go."""
        found: Any = None
        if distributed.is_first():
            try:
                if not self._read_only:
                    self.directory.make()
                elif not self.directory.exists():
                    raise ConfigError(
                        f"{self.directory}: no such folder; expected that of a run that has checkpoints"
                    )
                found = [[step, metrics] for step, metrics in _scan(self.directory).items()]
                if not self._read_only:
                    self._clean()
            except ConfigError as error:
                found = str(error)
            except Exception as error:  # a bucket's client has its own
                found = f"{self.directory} cannot be used: {type(error).__name__}: {error}"
        found = distributed.broadcast(found)
        if isinstance(found, str):
            raise ConfigError(found)
        return {step: metrics for step, metrics in found}

    def _clean(self) -> None:
        for name in self.directory.names():
            folder = self.directory / name
            # In a bucket nothing is renamed: an unfinished write lacks Orbax's mark.
            unfinished = self.directory.remote and name.isdigit() and folder.read(_FINAL_FILES[1]) is None
            if _TEMPORARY in name or unfinished:
                logger.warning("%s: removing what an interrupted write left", folder)
                self._remove(folder)

    def _remove(self, folder: Folder) -> None:
        """Delete a checkpoint's folder. What cannot be deleted stays, with a warning; links are not
        followed."""
        try:
            if not folder.is_inside(self.run.path):
                raise OSError("a symbolic link leads out of the run's folder")
            folder.remove()
        except Exception as error:
            logger.warning("%s could not be deleted and stays: %s", folder, error)

    @staticmethod
    def list_steps(run_dir: str | os.PathLike) -> list[int]:
        """Steps of the complete checkpoints of a run, ascending, without opening them."""
        return sorted(_scan(Folder(run_dir) / "checkpoints"))

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._metrics)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def save(
        self, step: int, state: TrainState, meta: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Write the state after ``step`` steps. ``meta`` is JSON-able; ``metrics`` are the latest logged
        values, which rank it.

        Raises:
            SaveError: an earlier write failed, or this one could not begin.
        """
        self.wait()
        if step in self._metrics:
            raise ValueError(f"{self.directory}: there is a complete checkpoint of step {step}")
        if self.config.keep_best and self.config.best_metric not in metrics:
            logger.warning(
                "checkpoint.best_metric %r has no value up to step %d: this checkpoint is not ranked",
                self.config.best_metric,
                step,
            )
        self._writing = step, {k: float(v) for k, v in metrics.items()}
        try:
            self._make_room(step)
            self._manager.save(
                step,
                args=self._ocp.args.Composite(
                    params=self._save_args(state.params),
                    optimizer=self._save_args(_optimizer_item(state)),
                    meta=self._ocp.args.JsonSave({**meta, "step": step}),
                ),
                force=True,
            )
        except Exception as error:
            raise self._error(error) from error
        self._finisher = threading.Thread(target=self._finish, name="checkpoint")
        self._finisher.start()
        if not self.config.asynchronous:
            self.wait()

    def _save_args(self, tree: Any) -> Any:
        size = self.config.file_mb
        return self._ocp.args.PyTreeSave(
            tree, ocdbt_target_data_file_size=size * 10**6 if size is not None else None
        )

    def _make_room(self, step: int) -> None:
        """Take away a damaged checkpoint of the same step, which Orbax would not write over."""
        if distributed.is_first() and (folder := self.directory / str(step)).exists():
            logger.warning("%s is incomplete and is written again", folder)
            folder.remove()
        distributed.barrier("room for a checkpoint")
        if step in self._manager.all_steps():
            self._manager.reload()

    def _record(self) -> None:
        """Orbax calls it on the first process when all files are written, right before it gives the
        checkpoint its final name (in a bucket: its mark)."""
        step, metrics = self._writing
        folder = self.directory / f"{step}{_TEMPORARY}"
        folder = folder if folder.exists() else self.directory / str(step)
        files = {name: size for name, size in folder.sizes().items() if name not in _FINAL_FILES}
        folder.write_json(RECORD, {"step": step, "metrics": metrics, "files": files})
        folder.sync()

    def _finish(self) -> None:
        try:
            self._manager.wait_until_finished()
        except BaseException:
            return  # raised once more by ``wait``
        step, metrics = self._writing
        self._metrics[step] = metrics
        self._prune()

    def _prune(self) -> None:
        kept = kept_steps(self._metrics, self.config)
        for step in sorted(set(self._metrics) - kept):
            del self._metrics[step]
            if distributed.is_first():
                self._remove(self.directory / str(step))

    def rank(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replace the metrics that rank a checkpoint, when they were known only after it was written."""
        self._metrics[step] = {k: float(v) for k, v in metrics.items()}
        if distributed.is_first():
            folder = self.directory / str(step)
            if record := folder.read_json(RECORD):
                folder.write_json(RECORD, {**record, "metrics": self._metrics[step]})

    def wait(self) -> None:
        """Until the last write and the deletions after it are done. SaveError when it failed."""
        if self._finisher is not None:
            self._finisher.join()
            self._finisher = None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> SaveError:
        self._failed = True
        step, have = self._writing[0], self.steps()
        return SaveError(
            f"the checkpoint of step {step} could not be written to {self.directory}: {_reason(error)}. "
            f"Nothing was deleted; complete are the checkpoints of {f'steps {have}' if have else 'no step'}"
        )

    def meta(self, step: int) -> dict[str, Any]:
        """The ``meta`` that ``save`` was given."""
        return self._restore(step, meta=self._ocp.args.JsonRestore())["meta"]

    def restore_params(self, step: int, like: Any) -> Any:
        """The parameters in the shardings and dtypes of ``like`` (ShapeDtypeStructs with shardings)."""
        self._compare(step, "params", like, dtypes=False)
        return self._restore(step, params=self._restore_args(like))["params"]

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The whole state in the shardings of ``like``, whatever mesh wrote it.

        Raises:
            ConfigError: an array's name, shape or dtype differs, or there is no complete checkpoint of
            ``step``.
        """
        optimizer = _optimizer_item(like)
        self._compare(step, "params", like.params)
        self._compare(step, "optimizer", optimizer)
        found = self._restore(
            step, params=self._restore_args(like.params), optimizer=self._restore_args(optimizer)
        )
        return TrainState(params=found["params"], **found["optimizer"])

    def _restore_args(self, like: Any) -> Any:
        return self._ocp.args.PyTreeRestore(
            like, restore_args=self._ocp.checkpoint_utils.construct_restore_args(like)
        )

    def raw(self, step: int) -> dict[str, Any]:
        """All arrays as nested dicts of numpy arrays, {"params": ..., "optimizer": ...}, whatever mesh wrote
        them."""
        items = ("params", "optimizer")
        found = self._restore(step, **{item: self._numpy_args(self._stored(step, item)) for item in items})
        return {item: found[item] for item in items}

    def arrays(self, step: int, item: str) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) of one item ("params", "optimizer"), one array at a time in memory."""
        paths, structure = jax.tree.flatten_with_path(self._stored(step, item))
        for number, (path, leaf) in enumerate(paths):
            only = [leaf if i == number else self._ocp.PLACEHOLDER for i in range(len(paths))]
            tree = jax.tree.unflatten(structure, only)
            found = self._restore(step, **{item: self._numpy_args(tree)})[item]
            yield _name(path), jax.tree.leaves(found)[number]

    def _numpy_args(self, tree: Any) -> Any:
        plain = jax.tree.map(lambda _: self._ocp.RestoreArgs(restore_type=np.ndarray), tree)
        return self._ocp.args.PyTreeRestore(tree, restore_args=plain)

    def _stored(self, step: int, item: str) -> Any:
        """Names, shapes and dtypes of a checkpoint's arrays."""
        self._check(step)
        return self._handler().metadata(_epath(self.directory / str(step) / item)).tree

    def _compare(self, step: int, item: str, like: Any, dtypes: bool = True) -> None:
        there, here = (_by_name(tree) for tree in (self._stored(step, item), like))
        wrong = [f"{name} is missing" for name in here if name not in there]
        wrong += [f"{name} is not known to this run" for name in there if name not in here]
        for name in [name for name in here if name in there]:
            (shape, dtype), (own_shape, own_dtype) = there[name], here[name]
            if shape != own_shape:
                wrong.append(f"{name} has shape {list(shape)}, this run's has {list(own_shape)}")
            elif dtypes and dtype != own_dtype:
                wrong.append(f"{name} is {dtype}, this run's is {own_dtype}")
        if wrong:
            more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
            raise ConfigError(
                f"{self.directory / str(step) / item} does not fit this run: {'; '.join(wrong[:3])}{more}. "
                "A run resumes with the model and the optimizer it was started with; init_from starts "
                "another run from its parameters"
            )

    def _check(self, step: int) -> None:
        if step not in self._metrics:
            raise ConfigError(
                f"{self.directory}: no complete checkpoint of step {step}; there are {self.steps()}"
            )

    def _restore(self, step: int, **items) -> Any:
        self._check(step)
        try:
            return self._manager.restore(step, args=self._ocp.args.Composite(**items))
        except Exception as error:
            raise ConfigError(
                f"{self.directory / str(step)} cannot be read: {_reason(error)}. If it is damaged, delete "
                "it: the one before it is then used"
            ) from error

    def close(self) -> None:
        """Wait for the last write. Raises SaveError if it failed, unless that was raised before."""
        try:
            if not self._failed:
                self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def kept_steps(metrics: Mapping[int, Mapping[str, float]], config: CheckpointConfig) -> set[int]:
    """Return the steps whose checkpoints stay: the last, every ``keep_every``-th, and the best.

    ``metrics`` are those of each step. Of equal values the newer is better; what is missing or not finite is
    no value.
    """
    steps = sorted(metrics)
    kept = set(steps[-config.keep_last :])
    if config.keep_every:
        kept |= {step for step in steps if step % config.keep_every == 0}
    sign = 1 if config.best_mode == "max" else -1
    values = {step: metrics[step].get(config.best_metric, math.nan) for step in steps}
    ranked = sorted(
        ((sign * value, step) for step, value in values.items() if math.isfinite(value)), reverse=True
    )
    return kept | {step for _, step in ranked[: config.keep_best]}


def _scan(directory: Folder) -> dict[int, dict[str, float]]:
    """Step -> metrics of the complete checkpoints; a message for each that is not."""
    sizes: dict[str, dict[str, int]] = {}
    for path, size in directory.sizes().items():
        name, _, rest = path.partition("/")
        sizes.setdefault(name, {})[rest] = size
    found = {}
    for name in sorted(set(directory.names()), key=lambda n: (len(n), n)):
        if not name.isdigit():
            continue
        record, problem = _complete(directory / name, sizes.get(name, {}))
        if problem:
            logger.warning("%s is passed over: %s", directory / name, problem)
        else:
            found[int(name)] = strict_json.numbers(record["metrics"])
    return found


def _complete(folder: Folder, sizes: Mapping[str, int]) -> tuple[dict[str, Any], str]:
    """A checkpoint's record, and what is wrong with it or ""."""
    record = folder.read_json(RECORD)
    if record is None or not {"metrics", "files"} <= set(record):
        return {}, f"it has no {RECORD}, so writing it was not finished"
    wrong = [name for name, size in record["files"].items() if sizes.get(name) != size]
    wrong += [name for name in _FINAL_FILES if name not in sizes]
    if wrong:
        return {}, f"{len(wrong)} of its files are missing or cut short ({', '.join(wrong[:3])})"
    return record, ""


def _by_name(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    leaves = jax.tree.leaves_with_path(tree)
    return {_name(path): (tuple(x.shape), str(np.dtype(x.dtype))) for path, x in leaves}


def _name(path: Any) -> str:
    parts = (getattr(p, "key", getattr(p, "name", getattr(p, "idx", p))) for p in path)
    return ".".join(str(part) for part in parts)


def _reason(error: BaseException) -> str:
    """The first line of an error; those of TensorStore go on with pages of its own source."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:500] if lines else ''}"


def _epath(folder: Folder) -> Any:
    from etils import epath

    return epath.Path(folder.path)


def _optimizer_item(state: TrainState) -> dict[str, Any]:
    return {k: getattr(state, k) for k in ("opt_state", "updates", "skipped_in_a_row")}
