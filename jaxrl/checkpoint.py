"""Checkpoints: Orbax's CheckpointManager around (parameters, optimizer, meta).

``<run>/checkpoints/<step>/`` holds three items: ``params`` and ``optimizer`` (OCDBT arrays, sharded: every
host writes its own part) and ``meta`` (JSON: data position, metric step, resolved config, versions).
Randomness needs no state: every number is a function of (seed, step, prompt, sample, position). There is no
pickle anywhere.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from jaxrl.batch import TrainState
from jaxrl.config import ConfigError, setting

logger = logging.getLogger("jaxrl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and which stay. The newest always stays."""

    every: int = setting(50, "steps between checkpoints; 0: only at the end")
    keep_last: int = setting(2, "newest checkpoints that stay")
    keep_every: int | None = setting(None, "checkpoints at multiples of this many steps stay for good")
    keep_best: int = setting(0, "best checkpoints that stay, by best_metric")
    best_metric: str = setting(
        "eval/pass_at_1", "logged metric that ranks checkpoints for keep_best (its latest value counts)"
    )
    best_mode: Literal["max", "min"] = setting("max", "whether more or less of best_metric is better")
    asynchronous: bool = setting(True, "write in the background while the next step runs")

    def problems(self) -> Iterable[tuple[str, str]]:
        for key, least in (("every", 0), ("keep_last", 1), ("keep_best", 0)):
            if getattr(self, key) < least:
                yield key, f"{getattr(self, key)}: needs {least} or more"
        if self.keep_every is not None and self.keep_every < 1:
            yield "keep_every", f"{self.keep_every}: needs a positive number of steps, or null"


class Checkpoints:
    """The checkpoints of one run directory.

    ``save`` returns once the arrays are copied off the device; an error of an earlier background write is
    raised by the next ``save`` or by ``close``. A checkpoint that was not completely written has no final
    name and is never listed.
    """

    def __init__(
        self, run_dir: str | Path, config: CheckpointConfig | None = None, *, read_only: bool = False
    ):
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as policies

        # Its warnings are about what we ask for.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.config = config or CheckpointConfig()
        self.directory = Path(run_dir).resolve() / "checkpoints"
        if read_only and not self.directory.is_dir():
            raise ConfigError(
                f"{self.directory}: no such folder; needed is the folder of a run that has checkpoints"
            )
        keep: list[Any] = [policies.LatestN(self.config.keep_last)]
        if self.config.keep_every:
            keep.append(policies.EveryNSteps(self.config.keep_every))
        if self.config.keep_best:
            best = policies.BestN(
                get_metric_fn=lambda metrics: metrics[self.config.best_metric],
                reverse=self.config.best_mode == "min",
                n=self.config.keep_best,
                keep_checkpoints_without_metrics=False,
            )
            keep.append(best)
        self._ocp = ocp
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(keep),
                enable_async_checkpointing=self.config.asynchronous,
                read_only=read_only,
                create=not read_only,
                cleanup_tmp_directories=not read_only,
            ),
            item_names=("params", "optimizer", "meta"),
        )

    @staticmethod
    def list_steps(run_dir: str | Path) -> list[int]:
        """Steps of the complete checkpoints of a run, ascending, without opening them."""
        folder = Path(run_dir) / "checkpoints"
        found = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(name) for name in found if name.isdigit())

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def save(
        self, step: int, state: TrainState, meta: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> None:
        """Write the state after ``step`` steps. ``meta`` is JSON-able; ``metrics`` are the latest logged
        values."""
        args = self._ocp.args
        ranked = {k: float(v) for k, v in metrics.items() if k == self.config.best_metric}
        self._manager.save(
            step,
            args=args.Composite(
                params=args.StandardSave(state.params),
                optimizer=args.StandardSave(_optimizer_item(state)),
                meta=args.JsonSave({**meta, "step": step}),
            ),
            metrics=ranked or None,
            force=True,
        )

    def meta(self, step: int) -> dict[str, Any]:
        """What ``save`` was given as ``meta``."""
        return self._restore(step, meta=self._ocp.args.JsonRestore())["meta"]

    def restore_params(self, step: int, like: Any) -> Any:
        """The parameters in the shardings and dtypes of ``like`` (ShapeDtypeStructs with shardings)."""
        return self._restore(step, params=self._ocp.args.StandardRestore(like))["params"]

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The whole state in the shardings of ``like``, whatever mesh wrote it. ConfigError when shapes
        differ."""
        args = self._ocp.args
        optimizer = args.StandardRestore(_optimizer_item(like))
        found = self._restore(step, params=args.StandardRestore(like.params), optimizer=optimizer)
        return TrainState(params=found["params"], **found["optimizer"])

    def raw(self, step: int) -> dict[str, Any]:
        """All arrays as nested dicts, {"params": ..., "optimizer": ...}, on one device,
        whatever mesh wrote them."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        reader = self._ocp.StandardCheckpointer()

        def read(item: str) -> Any:
            folder = self.directory / str(step) / item
            stored = reader.metadata(folder).item_metadata.tree
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), stored)
            return reader.restore(folder, like)

        return {item: read(item) for item in ("params", "optimizer")}

    def _restore(self, step: int, **items) -> Any:
        if step not in self.steps():
            raise ConfigError(
                f"{self.directory}: no complete checkpoint of step {step}; there are {self.steps()}"
            )
        try:
            return self._manager.restore(step, args=self._ocp.args.Composite(**items))
        except (ValueError, KeyError) as error:
            raise ConfigError(
                f"{self.directory / str(step)} does not fit this run's model or optimizer: {error}. "
                "A run resumes with the settings it was started with; init_from starts another run from its "
                "parameters"
            ) from error

    def close(self) -> None:
        """Wait for the last write; raises if it failed."""
        self._manager.wait_until_finished()
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _optimizer_item(state: TrainState) -> dict[str, Any]:
    return {k: getattr(state, k) for k in ("opt_state", "updates", "skipped_in_a_row")}


def shapes_with(shardings: Any, shapes: Any) -> Any:
    """ShapeDtypeStructs with shardings on them, from two trees of one structure."""
    return jax.tree.map(lambda s, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shardings, shapes)
