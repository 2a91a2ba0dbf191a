"""What lies in memory while a program runs: the arrays that ``train`` holds, and which of them each program
is given.

From the loop (``train.py``): parameters, optimizer state, the frozen reference, the sampler's copy of the
parameters and reward models live as long as the run. The kv cache and the prompts' caches live for one
rollout, a batch for its update.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jaxrl.compile.programs import Program, batch_shapes, state_shapes
from jaxrl.run.setup import Programs, Setup

PARAMS, OPTIMIZER, REFERENCE = "parameters", "optimizer", "reference"
ROLLOUT_PARAMS, CACHE, BATCH = "rollout parameters", "kv cache", "batch"
PROMPTS = "prompt cache"


@dataclasses.dataclass(frozen=True)
class Resident:
    """Arrays that one name stands for; bytes are of one device."""

    name: str
    device_bytes: int
    host_bytes: int
    phases: tuple[str, ...]
    """In which it is alive; (): in all."""
    largest: tuple[tuple[str, int], ...]
    """(what, bytes) of its largest arrays."""


def residents(parts: Setup, programs: Programs, listed: list[Program]) -> list[Resident]:
    """All that ``train`` holds on a device, or for it in its host's memory."""
    state = state_shapes(parts, programs)
    found = [_resident(PARAMS, state.params), _resident(OPTIMIZER, state.opt_state)]
    if parts.config.algo.uses_reference:
        found.append(_resident(REFERENCE, state.params))
    if programs.engine is not None and programs.refresh is not None:
        engine, sampled = programs.engine, ("rollout",)
        found.append(_resident(ROLLOUT_PARAMS, programs.refresh.shapes))
        found.append(_resident(CACHE, jax.eval_shape(engine._new_state).cache, sampled))
        for rows, empty in sorted(engine._new_prefix.items()):
            # The prompts of before are held until the next ones are prefilled.
            copies = 2 if rows > 1 and parts.config.data.prompts_per_step > rows else 1
            found.append(_resident(f"{PROMPTS} of {rows}", jax.eval_shape(empty), sampled, copies))
    for program in listed:
        if program.phase == "rewards":
            found.append(_resident(_reward_model(program), program.args[0]))
    batch = batch_shapes(parts, parts.config.algo.loss.columns)
    found.append(_resident(BATCH, batch, ("scoring", "update")))
    return list({r.name: r for r in found}.values())


def given(program: Program) -> tuple[str, ...]:
    """Names of the residents among a program's arguments."""
    family, _, rows = program.name.partition("/")
    if program.phase == "rewards":
        return (_reward_model(program),)
    return {
        "prefill": (ROLLOUT_PARAMS, f"{PROMPTS} of {rows}"),
        "write": (CACHE, f"{PROMPTS} of {rows}"),
        "append": (ROLLOUT_PARAMS, CACHE),
        "generate": (ROLLOUT_PARAMS, CACHE),
        "repeat": (f"{PROMPTS} of 1",),
        "score": (PARAMS, BATCH),
        "score_reference": (REFERENCE, BATCH),
        "update": (PARAMS, OPTIMIZER, BATCH),
        "refresh": (PARAMS, ROLLOUT_PARAMS),
    }.get(family, ())


def makes(program: Program) -> tuple[str, ...]:
    """Names of the residents that a program makes out of nothing."""
    family, _, rows = program.name.partition("/")
    prompts = (f"{PROMPTS} of {rows}",)
    return {"new_state": (CACHE,), "new_prefix": prompts, "repeat": prompts}.get(family, ())


def _reward_model(program: Program) -> str:
    return f"reward model {program.name.partition('/')[0]}"


def _resident(name: str, tree: Any, phases: tuple[str, ...] = (), copies: int = 1) -> Resident:
    bytes_of = {True: 0, False: 0}
    largest = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        size = copies * math.prod(shape) * x.dtype.itemsize
        on_host = x.sharding is not None and x.sharding.memory_kind == "pinned_host"
        bytes_of[on_host] += size
        if not on_host:
            where = jax.tree_util.keystr(path, simple=True, separator=".")
            largest.append((f"{where} {x.dtype.name}{list(shape)}", size))
    largest.sort(key=lambda item: -item[1])
    return Resident(name, bytes_of[False], bytes_of[True], phases, tuple(largest[:3]))
