"""All programs that a step of a run calls, each with the shapes of its arguments.

They are the jitted functions that the loop itself calls, so what is lowered from here is what it runs: for
plans of other devices, and for compiling ahead of a run. (Left out: copies and fills of a few
bytes that JAX runs one operation at a time, between programs.)
"""

from __future__ import annotations

from jaxrl.compile.program import (
    PARAMS,
    REFERENCE,
    REFRESH,
    ROLLOUT_PARAMS,
    Lengths,
    Program,
    Resident,
)
from jaxrl.learn.programs import batch_resident, batch_shapes, forward_program, update_program
from jaxrl.rewards.programs import reward_programs
from jaxrl.rollout.programs import Demand, engine_programs
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import Programs, Setup


def longest(config: RunConfig) -> Lengths:
    """The limits of the config."""
    new = config.rollout.max_new_tokens if config.trains_on_rollouts else 0
    return Lengths(prompt_tokens=config.data.max_prompt_tokens, new_tokens=new)


def demand(config: RunConfig, lengths: Lengths) -> Demand:
    """Requests of a step to the engine."""
    episodes = config.environment.name is not None
    return Demand(
        prompts=config.data.prompts_per_step,
        group_size=config.rollout.group_size,
        lengths=lengths,
        max_new_tokens=config.rollout.max_new_tokens,
        turns=config.environment.turns if episodes else 1,
        observation_tokens=config.environment.observation_tokens,
    )


def loop_programs(parts: Setup, programs: Programs, lengths: Lengths | None = None) -> list[Program]:
    """All programs of a steady-state step, evaluation included.

    Args:
        lengths: of the sequences, for how often a step calls what; None: the limits of the config.

    Raises:
        ConfigError: the folder of a reward model cannot be read.
    """
    config = parts.config
    lengths = longest(config) if lengths is None else lengths
    asked = demand(config, lengths)
    found: list[Program] = []
    if programs.engine is not None and programs.refresh is not None:
        samples = asked if config.trains_on_rollouts else None
        found += engine_programs(programs.engine, programs.refresh.shapes, samples)
        found += reward_programs(
            config.rewards.terms,
            parts.roles.reward_models,
            longest_tokens=parts.longest_tokens,
            sequences=asked.sequences if samples else 0,
        )
    found += _training(parts, programs, lengths)
    if (refresh := programs.refresh) is not None:
        params = parts.param_shapes()
        weights = Resident(name=PARAMS, shapes=params), Resident(name=ROLLOUT_PARAMS, shapes=refresh.shapes)
        found.append(
            Program(
                name="refresh",
                phase=REFRESH,
                jitted=refresh.program,
                args=refresh.args(params),
                mesh=parts.mesh,
                calls=1,
                reads=weights if refresh.shared else weights[:1],
            )
        )
    return found


def _training(parts: Setup, programs: Programs, lengths: Lengths) -> list[Program]:
    """Scoring and update."""
    config, algo, learner = parts.config, parts.config.algo, programs.learner
    shape, params = parts.batch_shape, parts.param_shapes()
    sequences = config.data.prompts_per_step * (config.rollout.group_size if config.trains_on_rollouts else 1)
    trips = shape.used(-(-sequences // algo.minibatches), lengths.prompt_tokens, lengths.new_tokens)
    held = batch_resident(batch_shapes(shape, parts.mesh, algo.loss.columns))
    found = [
        forward_program(
            learner,
            name,
            Resident(name=weights, shapes=params),
            shape,
            held,
            calls=algo.minibatches,
            trips=trips,
        )
        for role, name, weights in (
            ("policy", "statistics", PARAMS),
            ("reference", "reference_statistics", REFERENCE),
        )
        if role in algo.forwards.values()
    ]
    update = update_program(learner, params, shape, held, calls=algo.updates_per_step, trips=trips)
    return [*found, update]
