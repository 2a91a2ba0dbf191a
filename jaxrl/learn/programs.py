"""The programs of a learner, with the shapes that a run's batches have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxrl.compile.program import BATCH, OPTIMIZER, PARAMS, STATISTICS, UPDATE, Program, Resident, array
from jaxrl.learn.learner import Learner
from jaxrl.learn.optimizer import Hyper
from jaxrl.learn.packing import BatchShape
from jaxrl.mesh.sharding import shapes_with
from jaxrl.models import Model
from jaxrl.models.cost import attention_flops
from jaxrl.ops.axes import BATCH_AXES
from jaxrl.types import TARGETS, AttentionLayout, Column, TrainBatch, TrainState


def state_shapes(learner: Learner, params: Any) -> TrainState:
    """The train state around ``params`` (shapes), as ShapeDtypeStructs with shardings."""
    return shapes_with(learner.shardings, jax.eval_shape(learner.init_state, params))


def batch_shapes(shape: BatchShape, mesh: Mesh, columns: Iterable[Column] = ()) -> TrainBatch:
    """An update's batch, as ``packing.pack`` makes it and the recipe puts it on the devices."""

    def rows(dtype, *dims):
        dims = shape.micro_batches, shape.rows, *dims
        return array(dims, np.dtype(dtype), mesh, PartitionSpec(None, BATCH_AXES))

    ints, floats = rows(np.int32, shape.tokens), rows(np.float32, shape.tokens)
    attention = None
    if shape.attention_rows is not None:
        lanes = rows(np.int32, shape.attention_rows, shape.attention_tokens)
        attention = AttentionLayout(source=lanes, segment_ids=lanes, back=ints, page=shape.page)
    return TrainBatch(
        tokens=ints,
        positions=ints,
        segment_ids=ints,
        loss_mask=floats,
        loss_weights=floats,
        columns={column.name: rows(column.dtype, shape.tokens) for column in columns},
        sample_ids=ints if shape.whole_samples else None,
        predictors=None if attention is None else ints,
        attention=attention,
    )


def batch_resident(batch: TrainBatch) -> Resident:
    """The batch of an update, which statistics and update hold."""
    return Resident(name=BATCH, shapes=batch, phases=(STATISTICS, UPDATE))


def forward_program(
    learner: Learner,
    name: str,
    weights: Resident,
    shape: BatchShape,
    held: Resident,
    *,
    calls: float,
    trips: float,
) -> Program:
    """Statistics of an update's batch, which is ``held``, under ``weights``."""
    mesh = learner.mesh
    given = [column for column in learner.loss.columns if column is TARGETS]
    return Program(
        name=name,
        phase=STATISTICS,
        jitted=learner.forward,
        args=(weights.shapes, {}, batch_shapes(shape, mesh, given), array((), np.int32, mesh)),
        mesh=mesh,
        calls=calls,
        trips=trips,
        reads=(weights, held),
        attention_flops=_attention_flops(learner.model, shape),
    )


def update_program(
    learner: Learner, params: Any, shape: BatchShape, held: Resident, *, calls: float, trips: float
) -> Program:
    """An update of the state around ``params`` (shapes) with the batch that is ``held``."""
    mesh, model = learner.mesh, learner.model
    state = state_shapes(learner, params)
    number = jax.ShapeDtypeStruct((), np.float32)
    hyper = Hyper(**{field.name: number for field in dataclasses.fields(Hyper)})
    # Five products backward after two forward; those again where the backward pass recomputes them.
    passes = 1 + 2.5 + (model.remat in ("full", "offload", "dots"))
    return Program(
        name="update",
        phase=UPDATE,
        jitted=learner.update,
        args=(state, {}, held.shapes, array((), np.int32, mesh), hyper),
        mesh=mesh,
        calls=calls,
        trips=trips,
        reads=(
            Resident(name=PARAMS, shapes=state.params),
            Resident(name=OPTIMIZER, shapes=state.opt_state),
            held,
        ),
        attention_flops=passes * _attention_flops(model, shape),
    )


def _attention_flops(model: Model, shape: BatchShape) -> float:
    """FLOPs of a micro-batch, forward."""
    if shape.attention_rows is None:
        return attention_flops(model, shape.rows, shape.tokens)
    return attention_flops(model, shape.rows * shape.attention_rows, shape.attention_tokens)
