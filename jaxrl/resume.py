"""How a run continues: which folder it may use, what a checkpoint tells, and what may have changed
since."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl import distributed, strict_json
from jaxrl.assembly import Assembly, Programs
from jaxrl.batch import TrainState
from jaxrl.checkpoint import Checkpoints
from jaxrl.config import ConfigError, to_dict, to_yaml
from jaxrl.metrics import METRICS_FILE, environment
from jaxrl.programs import state_shapes
from jaxrl.settings import RunConfig
from jaxrl.step import init_train_state
from jaxrl.storage import Folder

logger = logging.getLogger("jaxrl")

CONFIG_FILE = "config.yaml"
_NOT_OF_THE_RUN = ("name", "output_dir", "resume", "checkpoint", "metrics", "profile")
"""Sections that do not change what is computed."""


def open_run_dir(config: RunConfig) -> Checkpoints:
    """The run's folder and its checkpoints, after ``resume`` has been obeyed.

    Raises:
        ConfigError: the folder has checkpoints and ``resume`` does not say what to do, or it says ``must``
        and there are none.
    """
    run = Folder(config.checkpoint_run)
    found = distributed.broadcast(distributed.is_first() and bool(Checkpoints.list_steps(run.path)))
    if found and config.resume is None:
        raise ConfigError(
            f"{run} already has checkpoints. Continue that run with resume=auto, start over with "
            "resume=never (they are set aside), or choose another name",
            "resume",
        )
    if config.resume == "must" and not found:
        raise ConfigError(f"'must', but {run} has no checkpoint to continue from", "resume")
    if distributed.is_first():
        if found and config.resume == "never":
            _set_aside(run)
        config.run_dir.mkdir(parents=True, exist_ok=True)
        (config.run_dir / CONFIG_FILE).write_text(to_yaml(config))
        if config.checkpoint.output_dir is not None:
            run.make()
            run.write(CONFIG_FILE, to_yaml(config).encode())
            _fetch_metrics(config, run)
    distributed.barrier("run folder")
    return Checkpoints(run.path, config.checkpoint)


def with_date(config: RunConfig) -> RunConfig:
    """``config`` with the date that the chat template printed in the run it continues, if it names none."""
    if config.data.chat_template_date is not None or config.resume not in ("auto", "must"):
        return config
    run = config.checkpoint_run
    if not distributed.broadcast(distributed.is_first() and bool(Checkpoints.list_steps(run))):
        return config
    with Checkpoints(run, read_only=True) as checkpoints:
        step = checkpoints.latest()
        saved = {} if step is None else checkpoints.meta(step)["config"]["data"]
    data = dataclasses.replace(config.data, chat_template_date=saved.get("chat_template_date"))
    return dataclasses.replace(config, data=data)


def _set_aside(run: Folder) -> None:
    number, there = 1, run.names()
    while (old := f"checkpoints.old{number}") in there:
        number += 1
    (run / "checkpoints").rename(old)
    logger.warning("%s is of an earlier run; it is now %s", run / "checkpoints", old)


def _fetch_metrics(config: RunConfig, run: Folder) -> None:
    """A new machine has no metrics of the run: they come from the bucket, where ``keep_metrics`` put
    them."""
    path = config.run_dir / METRICS_FILE
    if config.resume != "never" and not path.exists() and (data := run.read(METRICS_FILE)) is not None:
        path.write_bytes(data)
        logger.info("the metrics so far come from %s/%s", run, METRICS_FILE)


def keep_metrics(config: RunConfig, checkpoints: Checkpoints) -> None:
    """Copy the metrics to the bucket that holds the checkpoints; nothing to do when that is a file
    system."""
    path = config.run_dir / METRICS_FILE
    if checkpoints.run.remote and distributed.is_first() and path.exists():
        checkpoints.run.write(METRICS_FILE, path.read_bytes())


def restore_or_start(
    parts: Assembly, programs: Programs, checkpoints: Checkpoints
) -> tuple[TrainState, dict[str, Any], str | None]:
    """The newest checkpoint's state and meta, or a fresh state and {}; and the checkpoint that ``init_from``
    stood for when the run began: a KL reference stays that one, however far that other run has come since.

    Raises:
        ConfigError: the model, the optimizer or the seed are not those of the checkpoint.
    """
    step = checkpoints.latest()
    optim = parts.config.optim
    if step is None:
        origin = parts.origin()
        params = parts.initial_params(origin)
        return init_train_state(params, programs.optimizer, optim, programs.shardings), {}, origin
    meta = checkpoints.meta(step)
    tell_changes(meta["config"], to_dict(parts.config))
    meta |= {name: _numbers(meta[name]) for name in ("latest", "pending") if name in meta}
    logger.info("continuing from step %d of %s", step, checkpoints.directory)
    origin, changed = meta.get("origin"), meta["config"].get("init_from") != parts.config.init_from
    if parts.config.algo.uses_reference and (origin is None or changed):
        origin = parts.origin()
    return checkpoints.restore(step, state_shapes(parts, programs)), meta, origin


def tell_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Log which settings are not those of the checkpoint. What no longer fits its arrays is refused when
    they are restored.

    Raises:
        ConfigError: ``seed`` changed.
    """
    before, now = dict(_flat(old)), dict(_flat(new))
    for key in sorted(set(before) | set(now)):
        was, is_ = before.get(key), now.get(key)
        if was == is_ or key.partition(".")[0] in _NOT_OF_THE_RUN:
            continue
        if key == "seed":
            raise ConfigError(
                f"{is_}, but the run to continue has {was}, and all its random numbers depend on it. Start a "
                "run of another name from its parameters with init_from",
                "seed",
            )
        if key == "init_from":
            logger.warning(
                "init_from was %s, now %s: the weights are the checkpoint's all the same, a KL reference is "
                "the new one's",
                was,
                is_,
            )
        elif key.startswith("data."):
            logger.warning("%s was %s, now %s: from here on the data is another", key, was, is_)
        else:
            logger.info("%s was %s, now %s: applies from here on", key, was, is_)


def _flat(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(config, Mapping) and config:
        for name, value in config.items():
            yield from _flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, config


def run_meta(
    config: RunConfig,
    data: Mapping[str, Any],
    latest: Mapping[str, float],
    pending: Mapping[str, float] | None,
    origin: str | None,
) -> dict[str, Any]:
    """What a checkpoint says beside its arrays.

    Args:
        data: position of the prompt or row iterator.
        latest: each metric's latest value.
        pending: metrics of the checkpoint's own step when they still wait for its evaluation.
        origin: the checkpoint whose parameters the run began with.
    """
    return {
        "data": data,
        "rng": {"seed": config.seed, "state": "none: a function of (seed, step, prompt, sample, position)"},
        "latest": _plain(latest),
        "pending": _plain(pending),
        "origin": origin,
        "config": to_dict(config),
        **environment(),
    }


def _plain(metrics: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Metrics as JSON holds them."""
    return None if metrics is None else strict_json.plain(metrics)


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float] | None:
    """What ``_plain`` was given; None stands for every number that was not finite."""
    if metrics is None:
        return None
    return {name: math.nan if value is None else value for name, value in metrics.items()}
