"""The programs that a step of ``train`` runs on the devices, each with the shapes of its arguments.

They are the jitted functions that the loop itself calls, so what is lowered from here is what it runs: for
planning on devices that are not there, and for compiling ahead of a run. (Left out: copies and fills of a few
bytes that JAX runs one operation at a time, between programs.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.learn.optimizer import Hyper
from jaxrl.mesh.sharding import named, shapes_with
from jaxrl.models import hf
from jaxrl.ops.axes import BATCH_AXES
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.kv_cache import ROWS
from jaxrl.rollout.sampling import SamplingArrays
from jaxrl.run.setup import Programs, Setup
from jaxrl.types import TARGETS, AttentionLayout, Column, TrainBatch, TrainState

PHASES = ("rollout", "rewards", "scoring", "update", "refresh")
"""In the order of a step."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One jitted function and what it is called with."""

    name: str
    """Distinct; what follows a "/" says which of several shapes of one function."""
    phase: str
    """One of ``PHASES``."""
    jitted: Any
    """The very object that the loop calls."""
    args: tuple[Any, ...]
    """Trees of ShapeDtypeStruct; an array that the loop passes from the host has no sharding."""
    trips: int = 1
    """Most iterations of its loop whose length only the run decides: micro-batches, decode steps."""

    def lower(self) -> jax.stages.Lowered:
        """Traced for these shapes; ``compile()`` makes the executable."""
        return self.jitted.lower(*self.args)


def loop_programs(parts: Setup, programs: Programs) -> list[Program]:
    """All programs of a steady-state step, evaluation included.

    Raises:
        ConfigError: the folder of a reward model cannot be read.
    """
    algo, params = parts.config.algo, parts.param_shapes()
    found: list[Program] = []
    if programs.engine is not None and programs.refresh is not None:
        multi_turn = parts.config.environment.name is not None
        found += engine_programs(programs.engine, programs.refresh.shapes, multi_turn=multi_turn)
        found += reward_programs(parts)
    count, learner = _shape((), np.int32, parts.mesh), programs.learner
    trips = parts.batch_shape.micro_batches
    if roles := algo.forwards.values():
        given = tuple(column for column in algo.loss.columns if column is TARGETS)
        args: tuple[Any, ...] = (params, {}, batch_shapes(parts, given), count)
        if "policy" in roles:
            found.append(Program("score", "scoring", learner.forward, args, trips))
        if "reference" in roles:
            found.append(Program("score_reference", "scoring", learner.forward, args, trips))
    state, batch = state_shapes(parts, programs), batch_shapes(parts, algo.loss.columns)
    hyper = jax.eval_shape(lambda: Hyper.of(parts.config.optim, 0.0))
    found.append(Program("update", "update", learner.update, (state, {}, batch, count, hyper), trips))
    if programs.refresh is not None:
        refresh = programs.refresh
        found.append(Program("refresh", "refresh", refresh.program, (params, refresh.shapes)))
    return found


def state_shapes(parts: Setup, programs: Programs) -> TrainState:
    """The train state as ShapeDtypeStructs with shardings."""
    learner = programs.learner
    return shapes_with(learner.shardings, jax.eval_shape(learner.init_state, parts.param_shapes()))


def batch_shapes(parts: Setup, columns: Iterable[Column] = ()) -> TrainBatch:
    """An update's batch, as ``data.packing.pack`` makes it and ``stages`` puts it on the devices."""
    shape, rows = parts.batch_shape, PartitionSpec(None, BATCH_AXES)

    def array(dtype, *dims):
        return _shape((shape.micro_batches, shape.rows, *dims), np.dtype(dtype), parts.mesh, rows)

    ints, floats = array(np.int32, shape.tokens), array(np.float32, shape.tokens)
    attention = None
    if shape.attention_rows is not None:
        lanes = array(np.int32, shape.attention_rows, shape.attention_tokens)
        attention = AttentionLayout(source=lanes, segment_ids=lanes, back=ints, page=shape.page)
    return TrainBatch(
        tokens=ints,
        positions=ints,
        segment_ids=ints,
        loss_mask=floats,
        loss_weights=floats,
        columns={column.name: array(column.dtype, shape.tokens) for column in columns},
        sample_ids=ints if shape.whole_samples else None,
        predictors=None if attention is None else ints,
        attention=attention,
    )


def engine_programs(engine: Engine, params: Any, *, multi_turn: bool = False) -> Iterator[Program]:
    """The engine's programs for rollout ``params`` (shapes with shardings), as ``Engine.warm_up`` runs them.

    Names: "prefill/1" is of one prompt (a prefix that all share), "prefill/n" of n; likewise "write" and
    "new_prefix"; "generate/n" decodes n slots of each shard.
    """
    state = jax.eval_shape(engine._new_state)
    scalar = _shape((), np.int32, engine.mesh)
    key, requests = jax.ShapeDtypeStruct((2,), np.uint32), _request_shapes(engine)

    def program(name, jitted, *args, trips=1):
        return Program(name, "rollout", jitted, args, trips)

    yield program("new_state", engine._new_state)
    plan = {
        kind: (_shape((engine.shards * engine.cache.writes,), np.int32, engine.mesh, ROWS),) * 3
        for kind in (0, *engine.cache.geometry.rings)
    }
    prefixes = {n: jax.eval_shape(empty) for n, empty in engine._new_prefix.items()}
    for n, prefix in sorted(prefixes.items()):
        spec = PartitionSpec() if n == 1 else ROWS
        step = engine._prefill_one if n == 1 else engine._prefill_many
        tokens = _shape((n, engine.chunk), np.int32, engine.mesh, spec)
        yield program(f"new_prefix/{n}", engine._new_prefix[n])
        yield program(f"prefill/{n}", step, params, tokens, scalar, prefix)
        yield program(f"write/{n}", engine._write_jit, prefix, state.cache, plan)
        yield program(f"start/{n}", engine._start_jit, prefix, state.slots, requests, key)
    if engine.prefill_rows > 1:
        yield program(f"repeat/{engine.prefill_rows}", engine._repeat_jit, prefixes[1])
    if multi_turn:
        batch = _append_shapes(engine)
        yield program("append", engine._append_jit, params, state.cache, *batch, trips=_append_chunks(engine))
        last, _ = jax.eval_shape(engine._append_jit, params, state.cache, *batch)
        yield program("start/append", engine._start_jit, last, state.slots, requests, key)
    limits = _shape((2,), np.int32, engine.mesh)
    for size in engine.batches:
        rows = _shape((engine.shards * size,), np.int32, engine.mesh, ROWS)
        trips = engine.steps_per_dispatch
        yield program(f"generate/{size}", engine._generate_jit, params, state, rows, limits, trips=trips)


def reward_programs(parts: Setup) -> Iterator[Program]:
    """The scoring of each reward model, one program for each length of rows that a conversation can need: at
    most the longest training sequence, in the policy's tokens."""
    for number, term in enumerate(parts.config.rewards.terms):
        if not term.is_model:
            continue
        from jaxrl.models.reward_head import reward_head
        from jaxrl.rewards import model as reward

        key = f"rewards.terms.{number}.args"
        args = reward.read_args(term.args, key)
        folder = hf.resolve(args.path, f"{key}.path")
        head = reward_head(folder, parts.mesh, compute_dtype=args.compute_dtype, key=f"{key}.path")
        params = shapes_with(named(parts.mesh, head.specs(parts.mesh)), head.shapes(args.compute_dtype))
        jitted, rows = reward.scoring_program(head), reward.batch_rows(args, parts.mesh)
        longest = reward.row_tokens(min(args.max_tokens, parts.longest_tokens))
        spec = PartitionSpec(BATCH_AXES)
        width = reward.row_tokens(1)
        while width <= longest:
            tokens = _shape((rows, width), np.int32, parts.mesh, spec)
            lengths = _shape((rows,), np.int32, parts.mesh, spec)
            yield Program(f"{term.title}/{width}", "rewards", jitted, (params, tokens, lengths))
            width *= 2


def _request_shapes(engine: Engine) -> Any:
    """What ``insert`` and ``append`` tell about requests, see ``Engine._as_arrays``."""

    def column(dtype, *dims):
        return _shape((engine.slots, *dims), dtype, engine.mesh)

    ints, names, floats = column(np.int32), column(np.uint32), column(np.float32)
    sampling = SamplingArrays(floats, ints, floats, floats)
    table = column(np.int32, engine.cache.geometry.width)
    return ints, ints, names, names, ints, ints, sampling, table


def _append_shapes(engine: Engine) -> tuple[Any, ...]:
    """Slots, tables, tokens, starts and lengths, see ``Engine._append``."""

    def rows(*dims):
        return _shape((engine.prefill_rows, *dims), np.int32, engine.mesh, ROWS)

    return rows(), rows(engine.cache.geometry.width), rows(engine.cache.append_tokens), rows(), rows()


def _append_chunks(engine: Engine) -> int:
    return -(-engine.cache.append_tokens // engine.cache.append_chunk)


def _shape(dims, dtype, mesh, spec: PartitionSpec | None = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec or PartitionSpec()))
