"""Continuing a run: the folder it may use, what a checkpoint tells, and what may have changed since."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl.config import ConfigError, folder_problem, to_dict, to_yaml
from jaxrl.host import distributed
from jaxrl.learn.programs import state_shapes
from jaxrl.record.metrics import METRICS_FILE, WANDB_ID_FILE, environment, parse_line
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import Programs, Setup
from jaxrl.store import strict_json
from jaxrl.store.checkpoint import Checkpoints
from jaxrl.store.folders import Folder, is_remote
from jaxrl.types import TrainState

logger = logging.getLogger("jaxrl")

CONFIG_FILE = "config.yaml"
_NOT_OF_THE_RUN = ("name", "output_dir", "resume", "checkpoint", "metrics", "profile")
"""Sections that do not change what is computed."""


def check_folders(config: RunConfig) -> None:
    """See that the run's files can be written, before anything is loaded for it.

    Raises:
        ConfigError: they cannot, with the key of each folder.
    """
    folders = {"output_dir": str(config.run_dir), "executables": config.executables}
    if config.checkpoint.output_dir is not None:
        folders["checkpoint.output_dir"] = config.checkpoint_run
    local = {key: folder for key, folder in folders.items() if folder and not is_remote(folder)}
    found = [(key, problem) for key, folder in local.items() if (problem := folder_problem(folder))]
    if found:
        raise ConfigError(found)


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
        if _is_elsewhere(config, run):
            run.make()
            run.write(CONFIG_FILE, to_yaml(config).encode())
            if found and config.resume != "never":
                _fetch_records(config, run)
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


_RECORDS = (METRICS_FILE, WANDB_ID_FILE)
"""Files beside its checkpoints that a run needs to continue on another machine."""


def _is_elsewhere(config: RunConfig, run: Folder) -> bool:
    """True when the checkpoints' folder is another than the run's own."""
    return run.remote or not run.exists() or not os.path.samefile(run.path, config.run_dir)


def _fetch_records(config: RunConfig, run: Folder) -> None:
    """Take the metrics from beside the checkpoints, where ``keep_records`` put them, when this machine has
    none or only those of earlier steps."""
    for name in _RECORDS:
        path, data = config.run_dir / name, run.read(name)
        if data is None or (path.exists() and _last_step(path.read_bytes()) >= _last_step(data)):
            continue
        path.write_bytes(data)
        logger.info("%s so far comes from %s", name, run)


def _last_step(data: bytes) -> int:
    records = (parse_line(line) for line in data.decode(errors="replace").splitlines())
    return max((record["step"] for record in records if record and "step" in record), default=-1)


def keep_records(config: RunConfig, checkpoints: Checkpoints) -> None:
    """Copy the metrics to where the checkpoints are, when that is not the run's own folder. What cannot be
    copied is a warning: the next time copies all."""
    if not distributed.is_first() or not _is_elsewhere(config, checkpoints.run):
        return
    for name in _RECORDS:
        path = config.run_dir / name
        try:
            if path.exists():
                checkpoints.run.write(name, path.read_bytes())
        except Exception as error:  # a bucket's client has its own
            logger.warning("%s could not be copied to %s: %s", path, checkpoints.run, error)


def restore_or_start(
    parts: Setup, programs: Programs, checkpoints: Checkpoints
) -> tuple[TrainState, dict[str, Any], str | None]:
    """The newest checkpoint's state and meta, or a fresh state and {}; and the checkpoint that ``init_from``
    stood for when the run began: a KL reference stays that one, however far that other run has come since.

    Raises:
        ConfigError: the model, the optimizer or the seed are not those of the checkpoint.
    """
    step = checkpoints.latest()
    if step is None:
        origin = parts.origin()
        params = parts.initial_params(origin)
        return programs.learner.init_state(params), {}, origin
    meta = checkpoints.meta(step)
    tell_changes(meta["config"], to_dict(parts.config))
    meta |= {n: strict_json.numbers(meta[n]) for n in ("latest", "pending") if meta.get(n) is not None}
    logger.info("continuing from step %d of %s", step, checkpoints.directory)
    origin, changed = meta.get("origin"), meta["config"].get("init_from") != parts.config.init_from
    if parts.config.algo.uses_reference and (origin is None or changed):
        origin = parts.origin()
    return checkpoints.restore(step, state_shapes(programs.learner, parts.param_shapes())), meta, origin


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
    """Facts that a checkpoint holds beside its arrays.

    Args:
        data: position of the prompt or row iterator.
        latest: each metric's latest value.
        pending: metrics of the checkpoint's own step when they still wait for its evaluation.
        origin: the checkpoint whose parameters the run began with.
    """
    return {
        "data": data,
        "rng": {"seed": config.seed, "state": "none: a function of (seed, stream, prompt, sample, position)"},
        "latest": _plain(latest),
        "pending": _plain(pending),
        "origin": origin,
        "config": to_dict(config),
        **environment(),
    }


def _plain(metrics: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Metrics as JSON holds them."""
    return None if metrics is None else strict_json.plain(metrics)
