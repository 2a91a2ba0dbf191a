"""What of a run can be said without compiling it, as JSON-able values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax

from jaxrl.compile.programs import Program
from jaxrl.models import Model, ModelConfig
from jaxrl.ops.axes import TENSOR, batch_shards
from jaxrl.ops.chip import platform
from jaxrl.planner.residents import given, makes, residents
from jaxrl.run.setup import Programs, Setup

FILLS = ("new_state", "new_prefix", "repeat", "start")
"""Programs that fill or copy an array, left out unless every shape is asked for."""


def chosen(programs: Sequence[Mapping[str, Any]], *, every_shape: bool) -> list[str]:
    """Names of the programs to compile. The same function with the same shapes is compiled once."""
    names: dict[str, str] = {}
    for program in programs:
        family = program["name"].partition("/")[0]
        if every_shape:
            names[program["name"]] = program["name"]
        elif family not in FILLS:
            names[family] = program["name"]  # shapes are listed from small to large
    if "score" in names and "score_reference" in names:
        del names["score_reference"]
    return list(names.values())


def describe(parts: Setup, programs: Programs, listed: list[Program]) -> dict[str, Any]:
    """Programs, residents, sizes of the loop, for ``ledger`` and ``cost``."""
    shape, engine = parts.batch_shape, programs.engine
    facts = {
        "devices": parts.mesh.size,
        "mesh": dict(parts.mesh.shape),
        "rollout_mesh": dict(parts.rollout_mesh.shape) if engine else None,
        "parameters": num_parameters(parts.model.config),
        "micro_batches": shape.micro_batches,
        "rows": shape.rows,
        "row_tokens": shape.tokens,
        "shared": shape.attention_rows is not None,
    }
    if engine is not None:
        g = engine.cache.geometry
        facts |= {
            "slots": engine.slots,
            "shards": engine.shards,
            "prefill_rows": engine.prefill_rows,
            "chunk": engine.chunk,
            "steps_per_dispatch": engine.steps_per_dispatch,
            "page_tokens": g.page_tokens,
            "pages": g.pages,
            "page_width": g.width,
            "append_chunk": engine.cache.append_chunk,
        }
    return {
        "facts": facts,
        "residents": [dataclasses.asdict(r) for r in residents(parts, programs, listed)],
        "programs": [
            {
                "name": p.name,
                "phase": p.phase,
                "trips": p.trips,
                "given": given(p),
                "makes": makes(p),
                "attention_flops": attention_flops(parts, p),
            }
            for p in listed
        ],
    }


@cache
def num_parameters(config: ModelConfig) -> int:
    """Parameters of the whole model."""
    return sum(x.size for x in jax.tree.leaves(Model(config).shapes()))


def attention_flops(parts: Setup, program: Program) -> float:
    """FLOPs a device spends in one micro-batch in the training attention kernel, which tells the compiler
    nothing of them: two products forward, five backward, the causal half of each; forward again where the
    backward pass recomputes it. 0 where other attention is used, whose products are counted as they are."""
    model = parts.model
    kernel = model.attention == "pallas" or (model.attention is None and platform(parts.mesh) == "tpu")
    if not kernel or program.phase not in ("scoring", "update", "rewards"):
        return 0.0
    if program.phase == "rewards":
        rows, length = program.args[1].shape
        return _forward(parts, _reward_config(program, model.config), rows, length)
    shape = parts.batch_shape
    rows, length = shape.rows, shape.tokens
    if shape.attention_rows is not None:
        rows, length = shape.rows * shape.attention_rows, shape.attention_tokens
    forward = _forward(parts, model.config, rows, length)
    if program.phase == "scoring":
        return forward
    again = model.remat in ("full", "offload", "dots")
    return forward * (1 + 2.5 + again)


def _reward_config(program: Program, default: ModelConfig) -> ModelConfig:
    head = getattr(getattr(program.jitted, "__wrapped__", None), "__self__", None)
    return default if head is None else head.model.config


def _forward(parts: Setup, config: ModelConfig, rows: int, length: int) -> float:
    """Forward, per device."""
    seen = sum(length / 2 if k.window is None else min(length / 2, k.window) for k in config.layers)
    mesh = parts.mesh
    return (
        4.0
        * rows
        * length
        * seen
        * config.num_heads
        * config.head_dim
        / (batch_shards(mesh) * mesh.shape[TENSOR])
    )
