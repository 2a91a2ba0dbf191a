"""python -m jaxrl.train: the loop.

    python -m jaxrl.train --config configs/quickstart.yaml optim.learning_rate=1e-5

One step of reinforcement learning: prompts -> rollout -> rewards -> advantages -> batch -> scoring -> update
-> refresh. One step of supervised training: rows -> batch -> update. ``run`` reads in that order;
``stages.py`` holds what happens between two arrows.

Exit codes: 0 done, 1 the run diverged, 2 configuration, 3 user code, 75 interrupted and saved (start it again
to continue).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Arguments
from pathlib import Path
from typing import Any

import jax

from jaxrl import distributed, stages
from jaxrl.algorithms.losses import finish_metrics
from jaxrl.assembly import Assembly, Programs, assemble
from jaxrl.batch import Prompts, TrainState
from jaxrl.checkpoint import Checkpoints, shapes_with
from jaxrl.config import ConfigError, run_cli, to_dict, to_yaml
from jaxrl.data.packing import Sequence
from jaxrl.data.pipeline import PromptIterator, SftIterator, load_prompts
from jaxrl.evaluate import evaluate, sample_rows
from jaxrl.metrics import CompilationCounter, MetricsWriter, PhaseTimer, Profiler, environment, memory_metrics
from jaxrl.progress import Progress
from jaxrl.report import summary, write_report
from jaxrl.scoring import Scorer
from jaxrl.settings import RunConfig, parse
from jaxrl.step import init_train_state

logger = logging.getLogger("jaxrl")

INTERRUPTED = 75


class Diverged(Exception):
    """The run was ended because its updates kept failing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What stays the same from step to step."""

    parts: Assembly
    programs: Programs
    data: PromptIterator | SftIterator
    held_out: Prompts | None
    scorer: Scorer
    ref_params: Any
    """Frozen reference, train view; None when no KL term is used."""
    checkpoints: Checkpoints
    writer: MetricsWriter
    progress: Progress
    timer: PhaseTimer
    total_steps: int


def run(config: RunConfig, stop: threading.Event | None = None) -> int:
    """Train as ``config`` says. ``stop`` asks for a checkpoint and an end after the current step. Returns the
    exit code.

    Raises:
        ConfigError, UserCodeError: see ``jaxrl.config``.
        Diverged: ``algo.max_consecutive_skipped`` updates in a row had a non-finite gradient.
    """
    with contextlib.ExitStack() as stack:
        r, state, meta = open_run(config, stack)
        with distributed.failing_together():
            done = loop(r, state, meta, stop or threading.Event())
        interrupted = done < r.total_steps and stop is not None and stop.is_set()
        r.writer.event("interrupted" if interrupted else "done", step=done)
    if distributed.is_first():
        report = write_report(config.run_dir)
        print(summary(config.run_dir))
        if interrupted:
            print(f"interrupted after step {done} and saved; the same command with resume=auto continues")
        print(f"report: {report}")
    return INTERRUPTED if interrupted else 0


def loop(r: Run, state: TrainState, meta: Mapping[str, Any], stop: threading.Event) -> int:
    """The steps that are left, from ``state``. Returns the number of the last one."""
    config, programs = r.parts.config, r.programs
    done = saved = int(meta.get("step", 0))
    updates = int(state.updates)
    latest = dict(meta.get("metrics", {}))
    rollout_params = programs.refresh(state.params) if programs.refresh else None
    with (
        CompilationCounter() as compilations,
        contextlib.closing(Profiler(config.run_dir, config.profile)) as profiler,
    ):
        if config.eval.at_start and not meta:
            metrics = evaluation(r, rollout_params, 0, updates) | r.timer.metrics()
            latest |= metrics
            r.writer.log(0, metrics)
            r.progress.step(0, metrics)
        for step in range(done + 1, r.total_steps + 1):
            profiler.step(step)
            # 1 to 6: what to learn from.
            gathered = gather(r, state.params, rollout_params, step, updates)
            if gathered is None:
                logger.warning("the data ended after step %d of %d", done, r.total_steps)
                break
            sequences, metrics = gathered
            metrics["optim/learning_rate"] = float(programs.schedule(updates))
            # 7: the update.
            state, found = update(r, state, sequences, step)
            metrics |= found
            updates, failed = int(state.updates), int(state.skipped_in_a_row)
            # 8: the sampler gets the new weights; the old ones are let go first.
            if programs.refresh:
                with r.timer.phase("refresh"):
                    rollout_params = None
                    rollout_params = jax.block_until_ready(programs.refresh(state.params))
            # 9: evaluate, record, save; in this order, as a resumed run cuts lines that no checkpoint knows.
            if _due(config.eval.every, step) or (config.eval.at_end and step == r.total_steps):
                metrics |= evaluation(r, rollout_params, step, updates)
            latest |= metrics
            done = step
            metrics |= r.timer.metrics() | memory_metrics() | compilations.metrics()
            r.writer.log(step, metrics)
            r.progress.step(step, metrics)
            interrupted = step < r.total_steps and distributed.any_process(stop.is_set())
            if _due(config.checkpoint.every, step) or step == r.total_steps or interrupted:
                with r.timer.phase("checkpoint"):
                    r.checkpoints.save(step, state, run_meta(r, latest), latest)
                saved = step
            if failed >= config.algo.max_consecutive_skipped:
                raise Diverged(
                    f"step {step}: the gradient was not finite in {failed} updates in a row "
                    "(algo.max_consecutive_skipped). The parameters are those of the last good update. "
                    "Lower optim.learning_rate, or look at the last samples"
                )
            if interrupted:
                stop.set()
                break
    if saved < done:
        r.checkpoints.save(done, state, run_meta(r, latest), latest)
    return done


def gather(
    r: Run, params: Any, rollout_params: Any, step: int, policy_version: int
) -> tuple[list[Sequence], dict[str, float]] | None:
    """Stages 1 to 6: a step's sequences with advantages and log-probs, and metrics. None: no data left."""
    if isinstance(r.data, SftIterator):
        with r.timer.phase("prompts"):
            rows = next(r.data, None)
        return None if rows is None else (stages.supervised_sequences(rows), {})
    collected = stages.collect(
        r.parts,
        r.programs,
        rollout_params,
        r.data,
        r.scorer,
        step=step,
        policy_version=policy_version,
        timer=r.timer,
        progress=r.progress,
    )
    if collected is None:
        return None
    r.writer.samples(step, sample_rows(collected.rollouts, collected.scores))
    sequences = stages.sequences_of(collected.rollouts)
    with r.timer.phase("scoring") as phase:
        r.progress.update("scoring")
        sequences, phase.tokens = stages.score(r.parts, r.programs, params, r.ref_params, sequences)
    sequences, metrics = stages.with_advantages(r.parts.config, collected, sequences)
    return sequences, collected.metrics | metrics


def update(
    r: Run, state: TrainState, sequences: list[Sequence], step: int
) -> tuple[TrainState, dict[str, float]]:
    """Stage 7: an update for each minibatch of each epoch; ``state`` is donated."""
    results = []
    with r.timer.phase("update") as phase:
        r.progress.update("update")
        for batch, count in stages.minibatches(r.parts, sequences, step):
            state, result = r.programs.train_step(state, batch, count)
            results.append(finish_metrics(jax.device_get(result)))
        phase.tokens = sum(len(s.tokens) for s in sequences) * r.parts.config.algo.epochs
    if not results:
        return state, {"optim/skipped": r.parts.config.algo.updates_per_rollout}
    return state, stages.mean_metrics(results)


def evaluation(r: Run, rollout_params: Any, step: int, policy_version: int) -> dict[str, float]:
    """Held-out numbers of these weights. A supervised run keeps the completions: it has no other samples."""
    assert r.programs.engine is not None and r.held_out is not None
    with r.timer.phase("eval") as phase:
        found, completions, scores = evaluate(
            r.parts,
            r.programs.engine,
            rollout_params,
            r.held_out,
            r.scorer,
            policy_version=policy_version,
            progress=r.progress,
        )
        phase.tokens = int(completions.lengths.sum())
    if r.parts.config.algo.supervised:
        r.writer.samples(step, sample_rows(completions, scores))
    return found


def open_run(config: RunConfig, stack: contextlib.ExitStack) -> tuple[Run, TrainState, dict[str, Any]]:
    """What a run needs, closed with ``stack``; its state, restored or fresh; the checkpoint's meta or {}."""
    first = distributed.is_first()
    parts = assemble(config)
    checkpoints = stack.enter_context(open_run_dir(config))
    data = stack.enter_context(contextlib.closing(open_data(parts)))
    total = total_steps(config, len(data.examples))
    programs = parts.programs(total * config.algo.updates_per_rollout)
    held_out = (
        load_prompts(config.eval_data, parts.tokenizer, section="eval") if config.eval.enabled else None
    )
    scorer = stack.enter_context(contextlib.closing(Scorer(parts)))
    state, meta = restore_or_start(parts, programs, checkpoints)
    if meta:
        data.set_state(meta["data"])
    writer = MetricsWriter(
        config.run_dir,
        config.metrics,
        resume_step=meta["step"] if meta else None,
        enabled=first,
        run_config=to_dict(config),
    )
    progress = Progress(total, config.metrics.progress, start_step=meta.get("step", 0), enabled=first)
    r = Run(
        parts=parts,
        programs=programs,
        data=data,
        held_out=held_out,
        scorer=scorer,
        ref_params=parts.initial_params() if config.algo.uses_reference else None,
        checkpoints=checkpoints,
        writer=stack.enter_context(writer),
        progress=stack.enter_context(progress),
        timer=PhaseTimer(),
        total_steps=total,
    )
    return r, state, meta


def open_run_dir(config: RunConfig) -> Checkpoints:
    """The run's folder and its checkpoints, after ``resume`` has been obeyed.

    Raises:
        ConfigError: the folder has checkpoints and ``resume`` does not say what to do, or it says ``must``
        and there are none.
    """
    folder = config.run_dir
    found = (folder / "checkpoints").is_dir() and bool(Checkpoints.list_steps(folder))
    if found and config.resume is None:
        raise ConfigError(
            f"{folder} already has checkpoints. Continue that run with resume=auto, start over with "
            "resume=never (they are set aside), or choose another name",
            "resume",
        )
    if config.resume == "must" and not found:
        raise ConfigError(f"'must', but {folder} has no checkpoint to continue from", "resume")
    if distributed.is_first():
        if found and config.resume == "never":
            _set_aside(folder / "checkpoints")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config))
    distributed.barrier("run folder")
    return Checkpoints(folder, config.checkpoint)


def _set_aside(folder: Path) -> None:
    number = 1
    while (old := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    folder.rename(old)
    logger.warning("%s is of an earlier run; it is now %s", folder, old.name)


def open_data(parts: Assembly) -> PromptIterator | SftIterator:
    """The stream of training prompts, or of supervised rows."""
    config = parts.config
    if config.algo.supervised:
        key = "batch.row_tokens" if config.batch.row_tokens else "data.max_prompt_tokens"
        return SftIterator(
            config.data, parts.tokenizer, config.seed, max_tokens=parts.longest_tokens, max_tokens_key=key
        )
    return PromptIterator(config.data, parts.tokenizer, config.seed)


def total_steps(config: RunConfig, rows: int) -> int:
    """Steps of the whole run: ``steps``, or what ``data.epochs`` passes over the rows give, whichever is
    less."""
    if config.data.epochs is None:
        assert config.steps is not None  # RunConfig.problems
        return config.steps
    there = -(-rows * config.data.epochs // config.data.prompts_per_step)
    return there if config.steps is None else min(config.steps, there)


def restore_or_start(
    parts: Assembly, programs: Programs, checkpoints: Checkpoints
) -> tuple[TrainState, dict[str, Any]]:
    """The newest checkpoint's state and meta, or a fresh state and {}."""
    step = checkpoints.latest()
    optim = parts.config.optim
    if step is None:
        state = init_train_state(parts.initial_params(), programs.optimizer, optim, programs.shardings)
        return state, {}
    shapes = jax.eval_shape(
        lambda params: init_train_state(params, programs.optimizer, optim, programs.shardings),
        parts.param_shapes(),
    )
    logger.info("continuing from step %d of %s", step, checkpoints.directory)
    return checkpoints.restore(step, shapes_with(programs.shardings, shapes)), checkpoints.meta(step)


def run_meta(r: Run, latest: Mapping[str, float]) -> dict[str, Any]:
    """What a checkpoint says beside its arrays."""
    return {
        "data": r.data.get_state(),
        "metrics": {k: v for k, v in latest.items() if k.startswith("eval/")},
        "config": to_dict(r.parts.config),
        **environment(),
    }


def _due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[threading.Event]:
    """An event that the first SIGTERM or SIGINT sets; the second ends the program at once."""
    stop = threading.Event()

    def handle(number, frame):
        if stop.is_set():
            os._exit(128 + number)
        stop.set()
        logger.warning("signal %d: saving a checkpoint after this step; once more to end at once", number)

    old = {n: signal.signal(n, handle) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def main(argv: Arguments[str]) -> int:
    """The command line."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logger.setLevel(logging.INFO)
    config, _ = parse(
        argv,
        prog="python -m jaxrl.train",
        description="Post-train a language model: supervised, or by reinforcement (the GRPO family).",
    )
    distributed.start()
    with stop_on_sigterm() as stop:
        try:
            return run(config, stop)
        except Diverged as error:
            print(f"diverged: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(run_cli(main))
