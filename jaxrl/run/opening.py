"""Everything that a run needs before its first step."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from typing import Any

from jaxrl.compile import executables
from jaxrl.config import to_dict
from jaxrl.data.pipeline import PromptIterator, SftIterator, load_prompts
from jaxrl.host import distributed
from jaxrl.recipes.context import Context
from jaxrl.record.metrics import MetricsWriter, PhaseTimer
from jaxrl.record.progress import Progress
from jaxrl.run.agreement import agree_on_config, agree_on_inputs
from jaxrl.run.programs import loop_programs
from jaxrl.run.resume import (
    check_folders,
    open_run_dir,
    restore_or_start,
    with_date,
)
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import Programs, Setup, set_up
from jaxrl.run.watch import Watch, warn_at_start
from jaxrl.store.checkpoint import Checkpoints
from jaxrl.types import Prompts, TrainState

logger = logging.getLogger("jaxrl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Objects that stay the same from step to step."""

    parts: Setup
    programs: Programs
    context: Context
    held_out: Prompts | None
    origin: str | None
    """The checkpoint that ``init_from`` stood for when the run began."""
    checkpoints: Checkpoints
    watch: Watch
    total_steps: int


def open_run(
    config: RunConfig, stop: threading.Event, stack: contextlib.ExitStack
) -> tuple[Run, TrainState, dict[str, Any]]:
    """Return all that a run needs, closed with ``stack``; its state, restored or fresh; the checkpoint's
    meta or {}."""
    agree_on_config(config)
    first = distributed.is_first()
    if first:
        check_folders(config)
    parts = set_up(with_date(config))
    config = parts.config
    checkpoints = stack.enter_context(open_run_dir(config))
    data = stack.enter_context(contextlib.closing(open_data(parts)))
    total = total_steps(config, len(data.examples))
    tell_total(config, len(data.examples), total)
    warn_at_start(config, total * config.algo.updates_per_step)
    held_out = (
        load_prompts(config.eval_data, parts.tokenizer, section="eval") if config.eval.enabled else None
    )
    agree_on_inputs(parts, data, held_out)
    programs = parts.programs(total * config.algo.updates_per_step)
    if config.executables:
        executables.prepare(loop_programs(parts, programs), config.executables)
    scorer = parts.scorer(stack)
    state, meta, origin = restore_or_start(parts, programs, checkpoints)
    if meta:
        data.set_state(meta["data"], strict=False)
    writer = MetricsWriter(
        config.run_dir,
        config.metrics,
        resume_step=meta["step"] if meta else None,
        pending=meta.get("pending") is not None,
        enabled=first,
        run_config=to_dict(config),
    )
    progress = Progress(total, config.metrics.progress, start_step=meta.get("step", 0), enabled=first)
    context = Context(
        seed=config.seed,
        data=config.data,
        rollout=config.rollout,
        rewards=config.rewards,
        optim=config.optim,
        stream=data,
        learner=programs.learner,
        schedule=programs.schedule,
        batch_shape=parts.batch_shape,
        ref_params=parts.initial_params(origin) if config.algo.uses_reference else None,
        sampler=parts.sampler(programs.engine, stack) if programs.engine else None,
        scorer=scorer,
        writer=stack.enter_context(writer),
        progress=stack.enter_context(progress),
        timer=PhaseTimer(),
        stop=stop,
    )
    r = Run(
        parts=parts,
        programs=programs,
        context=context,
        held_out=held_out,
        origin=origin,
        checkpoints=checkpoints,
        watch=Watch(config),
        total_steps=total,
    )
    return r, state, meta


def open_data(parts: Setup) -> PromptIterator | SftIterator:
    """The stream of training prompts, or of supervised rows."""
    config = parts.config
    if not config.trains_on_rollouts:
        key = "batch.row_tokens" if config.batch.row_tokens else "data.max_prompt_tokens"
        longest, context = parts.longest_tokens, parts.model.config.max_positions
        if context < longest:
            longest, key = context, "the model's max_position_embeddings"
        return SftIterator(config.data, parts.tokenizer, config.seed, longest, max_tokens_key=key)
    return PromptIterator(config.data, parts.tokenizer, config.seed)


def total_steps(config: RunConfig, rows: int) -> int:
    """Steps of the whole run: ``steps``, or what ``data.epochs`` passes over the rows give, whichever is
    less."""
    if config.data.epochs is None:
        assert config.steps is not None  # RunConfig.problems
        return config.steps
    there = -(-rows * config.data.epochs // config.data.prompts_per_step)
    return there if config.steps is None else min(config.steps, there)


def tell_total(config: RunConfig, rows: int, total: int) -> None:
    """Where the data decides how long the run is, and its schedules with it."""
    if config.data.epochs is None:
        return
    if config.steps is not None and total < config.steps:
        logger.warning(
            "data.epochs %d gives %d steps, fewer than steps %d; the run and its schedules have %d",
            config.data.epochs,
            total,
            config.steps,
            total,
        )
    prompts = config.data.prompts_per_step * (1 + config.algo.extra_rounds)
    fewest = -(-rows * config.data.epochs // prompts)
    if fewest < total:
        logger.warning(
            "extra rounds of sampling can use up the data after %d of %d steps; optim.schedule (%s) is laid "
            "out for %d. steps gives the run a length that does not depend on the samples",
            fewest,
            total,
            config.optim.schedule,
            total,
        )
