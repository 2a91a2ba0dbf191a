"""python -m jaxrl.train: the loop.

    python -m jaxrl.train --config configs/quickstart.yaml optim.learning_rate=1e-5

One step of reinforcement learning: prompts -> rollout -> rewards -> advantages -> batch -> statistics ->
update -> refresh. One step of supervised training: rows -> batch -> update. ``run`` reads in that order;
``recipes/collect.py`` and ``recipes/stages.py`` hold what happens between two arrows.

Exit codes: 0 done; 1 the run diverged, a checkpoint could not be written, or another process is gone; 2
configuration, or processes that disagree; 3 user code; 75 interrupted and saved; 76 interrupted without a
new checkpoint. After 75 and 76 the same command continues.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxrl.compile.compilations import CompilationCounter
from jaxrl.config import ConfigError, RunError
from jaxrl.host import distributed, pathways
from jaxrl.host.failures import failing_together
from jaxrl.host.preemption import INTERRUPTED, Interrupted, announced, check
from jaxrl.recipes.collect import sample_rows
from jaxrl.record.metrics import Profiler, memory_metrics
from jaxrl.record.report import summary, write_report
from jaxrl.run.evaluation import evaluate
from jaxrl.run.opening import Run, open_run
from jaxrl.run.programs import loop_programs
from jaxrl.run.resume import (
    keep_records,
    run_meta,
)
from jaxrl.run.settings import RunConfig
from jaxrl.types import TrainState

logger = logging.getLogger("jaxrl")


class Diverged(RunError):
    """The run was ended because its updates kept failing."""

    title = "diverged"


def run(config: RunConfig, stop: threading.Event | None = None) -> int:
    """Train as ``config`` says. ``stop`` asks for a checkpoint and an end at the next safe point (see
    ``preemption.py``). Returns the exit code.

    Raises:
        ConfigError, UserCodeError: see ``jaxrl.config``.
        SaveError: a checkpoint could not be written.
        Recompiled: with ``metrics.compilations`` "error", a program was compiled after the first step.
        Diverged: ``algo.max_consecutive_skipped`` updates in a row had a non-finite gradient.
    """
    asked = {"traced": config.profile.start_step is not None, "executables": bool(config.executables)}
    if found := list(pathways.problems(config.checkpoint_run, **asked)):
        raise ConfigError(found)
    with contextlib.ExitStack() as stack:
        with failing_together():
            r, state, meta = open_run(config, stop or threading.Event(), stack)
            done, interrupted = loop(r, state, meta)
            r.checkpoints.wait()
        with warns_only("the end of the run"):
            if not interrupted:
                r.context.writer.event("done", step=done)
            keep_records(config, r.checkpoints)
    if distributed.is_first():
        if done:
            with warns_only("the report"):
                report = write_report(config.run_dir)
                print(summary(config.run_dir))
                print(f"report: {report}")
        if interrupted:
            print(f"interrupted after step {done} and saved; the same command with resume=auto continues")
    return INTERRUPTED if interrupted else 0


@contextlib.contextmanager
def warns_only(what: str) -> Iterator[None]:
    """Make an error inside a warning: the checkpoints are written, so the run has succeeded."""
    try:
        yield
    except Exception as error:
        logger.warning("%s could not be written: %s: %s", what, type(error).__name__, error)


def loop(r: Run, state: TrainState, meta: Mapping[str, Any]) -> tuple[int, bool]:
    """The steps that are left, from ``state``. Returns the number of the last whole one, and whether
    ``r.stop`` ended the run before its time."""
    config, context = r.parts.config, r.context
    done, saved = int(meta.get("step", 0)), int(meta.get("step", -1))
    interrupted, updates, latest = False, int(state.updates), dict(meta.get("latest", {}))
    position = r.context.stream.get_state()  # after step `done`
    # Metrics of step `done` that wait for its evaluation: at the start, or where an interrupted run left
    # off.
    pending = meta["pending"] if meta else {} if config.eval.at_start else None

    def save() -> None:
        with r.context.timer.phase("checkpoint"):
            r.context.writer.sync()
            keep_records(config, r.checkpoints)  # first: a checkpoint is not to outlive its metrics
            r.checkpoints.save(done, state, run_meta(config, position, latest, pending, r.origin), latest)
        compilations.forget()  # slices and copies for the writer

    trace_folder = config.checkpoint_run if pathways.is_used() else config.run_dir
    with (
        compilation_counter(r) as compilations,
        contextlib.closing(Profiler(trace_folder, config.profile)) as profiler,
    ):
        try:
            check(r.context.stop)
            rollout_params = refresh(r, state)
            if pending is not None:
                metrics = pending | evaluation(r, done)
                latest, pending = latest | metrics, None
                record(r, done, metrics, compilations)
                if saved == done:
                    r.checkpoints.rank(done, latest)
            first = done + 1
            for step in range(first, r.total_steps + 1):
                if announced(step):
                    r.context.stop.set()
                profiler.step(step)
                # 1 to 7: gather what to learn from, and update.
                outcome = config.algo.step(context, state, step)
                if outcome is None:
                    tell_data_ended(r, done, updates)
                    break
                state, metrics = outcome
                done, position = step, r.context.stream.get_state()
                last = step == r.total_steps or r.context.stream.ended
                updates, failed = int(state.updates), int(state.skipped_in_a_row)
                # 8: the sampler gets the new weights, in the place of the old ones.
                if context.sampler is not None:
                    with context.timer.phase("refresh"):
                        rollout_params = refresh(r, state, rollout_params)
                # 9: evaluate, record, save; in this order, as a resumed run cuts lines that no checkpoint
                # knows.
                if _due(config.eval.every, step) or (config.eval.at_end and last):
                    pending = metrics
                    metrics = metrics | evaluation(r, step)
                latest, pending = latest | metrics, None
                record(r, step, metrics, compilations)
                r.watch.step(metrics)
                if step == first:
                    compilations.forget()
                compilations.check(step)
                if _due(config.checkpoint.every, step) or last:
                    save()
                    saved = step
                if failed >= config.algo.max_consecutive_skipped:
                    raise Diverged(
                        f"step {step}: the gradient was not finite in {failed} updates in a row "
                        "(algo.max_consecutive_skipped). The parameters are those of the last good update. "
                        "Lower optim.learning_rate, or look at the last samples"
                    )
                if last and step < r.total_steps:
                    tell_data_ended(r, done, updates)
                    break
        except Interrupted as left:
            interrupted = True
            tell_interrupted(r, done, left, pending is not None)
        if saved < done or (interrupted and saved < 0):
            save()
    return done, interrupted


def refresh(r: Run, state: TrainState, *old: Any) -> Any:
    """Give the sampler the weights of ``state``, and return them; None where nothing is sampled. ``old`` are
    those it had, whose memory is used again."""
    if r.programs.refresh is None or r.context.sampler is None:
        return None
    new = jax.block_until_ready(r.programs.refresh(state.params, *old))
    r.context.sampler.swap(new, int(state.updates))
    return new


def compilation_counter(r: Run) -> CompilationCounter:
    """It insists on what ``metrics.compilations`` says, and tells the run's programs by name."""
    strict = r.parts.config.metrics.compilations == "error"
    return CompilationCounter(loop_programs(r.parts, r.programs) if strict else (), strict=strict)


def record(r: Run, step: int, metrics: Mapping[str, float], compilations: CompilationCounter) -> None:
    """A step's line in every log."""
    metrics = {**metrics, **r.context.timer.metrics(), **memory_metrics(), **compilations.metrics()}
    r.context.writer.log(step, metrics)
    r.context.progress.step(step, metrics)


def tell_interrupted(r: Run, done: int, left: Interrupted, evaluating: bool) -> None:
    """Log and record the work that the run leaves unfinished."""
    found = {"discarded_samples": left.samples, "discarded_tokens": left.tokens}
    r.context.writer.event("interrupted", step=done, **found)
    if left.samples or left.tokens:
        again = f"evaluation of step {done}" if evaluating else f"step {done + 1}"
        logger.warning(
            "the %s is left unfinished: its %d samples (%d tokens) are thrown away, and sampled again, the "
            "very same, when the run continues",
            again,
            left.samples,
            left.tokens,
        )


def tell_data_ended(r: Run, done: int, updates: int) -> None:
    """The run ends before its last step, and its schedule with it."""
    logger.warning(
        "the data ended after step %d of %d: optim.schedule (%s) is laid out for %d steps, and the learning "
        "rate ended at %.3g",
        done,
        r.total_steps,
        r.parts.config.optim.schedule,
        r.total_steps,
        float(r.programs.schedule(max(updates - 1, 0))),
    )


def evaluation(r: Run, step: int) -> dict[str, float]:
    """Held-out numbers of the sampler's weights. A supervised run keeps the completions: it has no other
    samples."""
    context = r.context
    assert context.sampler is not None and r.held_out is not None
    with context.timer.phase("eval") as phase:
        found, completions, scores = evaluate(
            r.parts,
            context.sampler,
            r.held_out,
            context.scorer,
            progress=context.progress,
            stop=context.stop,
        )
        phase.tokens = int(completions.sampled_lengths.sum())
    if not r.parts.config.trains_on_rollouts:
        r.context.writer.samples(step, sample_rows(completions, scores))
    return found


def _due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0
