"""Forward passes and updates over a step's sequences: stages 5 to 7, the same for every recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl.host.distributed import to_host
from jaxrl.learn import metrics
from jaxrl.learn.optimizer import Hyper
from jaxrl.learn.packing import PackIndex, Sequence, pack, unpack
from jaxrl.mesh.sharding import put
from jaxrl.ops.axes import BATCH_AXES
from jaxrl.recipes.context import Context
from jaxrl.types import TARGETS, Column, TrainBatch, TrainState

Weights = Callable[[np.ndarray], np.ndarray]
"""int [B] learned tokens of the samples of an update -> float [B], the weight of each one's tokens."""


def with_log_probs(
    context: Context, sequences: list[Sequence], params: Mapping[str, Any], minibatches: int = 1
) -> list[Sequence]:
    """The sequences with columns of log-probs, by forward passes in the shape of an update's batch.

    Args:
        params: name of a column -> the parameters that give it.
    """
    if not sequences or not params:
        return sequences
    found: list[Sequence] = []
    samples = by_sample(sequences)
    with context.timer.phase("statistics") as phase:
        context.progress.update("statistics")
        for part in _split(np.arange(len(samples)), minibatches):
            chosen = [s for i in part for s in samples[i]]
            batch, count, index, tokens = _packed(context, chosen, targets(context))
            values = {
                name: unpack(to_host(context.learner.forward(weights, {}, batch, count).log_probs), index)
                for name, weights in params.items()
            }
            phase.tokens += len(params) * tokens
            for i, s in enumerate(chosen):
                own = {name: rows[i] for name, rows in values.items()}
                found.append(dataclasses.replace(s, columns={**s.columns, **own}))
    return found


def update(
    context: Context,
    state: TrainState,
    sequences: list[Sequence],
    step: int,
    weights: Weights,
    *,
    minibatches: int = 1,
    epochs: int = 1,
) -> tuple[TrainState, dict[str, float]]:
    """An update for each minibatch of each epoch (see ``split``). ``state`` is donated; metrics are those of
    all updates."""
    results, learning_rate = [], float(context.schedule(int(state.updates)))
    with context.timer.phase("update") as phase:
        context.progress.update("update")
        key = context.seed, step
        for part in split(sequences, weights, key, minibatches=minibatches, epochs=epochs):
            batch, count, _, tokens = _packed(context, part, context.learner.loss.columns)
            learning_rate = float(context.schedule(int(state.updates)))
            hyper = Hyper.of(context.optim, learning_rate)
            state, result = context.learner.update(state, {}, batch, count, hyper)
            results.append(jax.device_get(result))
            phase.tokens += tokens
    rate = {"optim/learning_rate": learning_rate}
    if not results:
        return state, {"optim/skipped": float(minibatches * epochs), **rate}
    counted = sum(len(s.tokens) for s in sequences) * epochs
    sizes = {"batch/computed_tokens": float(phase.tokens), "batch/counted_tokens": float(counted)}
    return state, metrics.finish(*results) | sizes | rate


def split(
    sequences: list[Sequence],
    weights: Weights,
    key: tuple[int, int],
    *,
    minibatches: int = 1,
    epochs: int = 1,
) -> Iterator[list[Sequence]]:
    """The sequences of each update, with their loss weights.

    Every epoch splits the samples anew, in an order that depends on ``key`` (run seed, step) and the epoch
    alone. Weights are of a whole update, and of a sample: the rows of an episode stay together and weigh as
    one.
    """
    samples = by_sample(sequences)
    for epoch in range(epochs if sequences else 0):
        order = np.arange(len(samples))
        if minibatches > 1:
            order = np.random.default_rng((*key, epoch)).permutation(order)
        for chosen in _split(order, minibatches):
            own = [samples[i] for i in chosen]
            yield [
                dataclasses.replace(s, loss_weights=weight * s.loss_mask)
                for rows, weight in zip(own, weights(num_tokens(own)), strict=True)
                for s in rows
            ]


def by_sample(sequences: list[Sequence]) -> list[list[Sequence]]:
    """The rows of each sample: one, but for episodes whose history was rewritten."""
    samples: dict[int, list[Sequence]] = {}
    for i, s in enumerate(sequences):
        samples.setdefault(i if s.sample is None else s.sample, []).append(s)
    return list(samples.values())


def num_tokens(samples: list[list[Sequence]]) -> np.ndarray:
    """[B] learned tokens of each sample, over all its rows."""
    return np.array([sum(s.loss_mask.sum() for s in rows) for rows in samples])


def targets(context: Context) -> tuple[Column, ...]:
    """The column that a forward pass reads: ids of the loss, where it has its own targets."""
    return tuple(column for column in context.learner.loss.columns if column is TARGETS)


def _split(numbers: np.ndarray, parts: int) -> list[np.ndarray]:
    """``numbers`` in ``parts`` nearly equal pieces; fewer where there are fewer numbers, as none is empty."""
    return np.array_split(numbers, min(parts, len(numbers)))


def _packed(
    context: Context, sequences: list[Sequence], columns: tuple[Column, ...]
) -> tuple[TrainBatch, jax.Array, PackIndex, int]:
    """Packed and on device: batch [M, R, T], number of real micro-batches, where each sequence lies, and the
    tokens that are computed: a prompt once in each row that shares it."""
    batch, count, index = pack(sequences, context.batch_shape, columns)
    tokens, mesh = int(np.count_nonzero(batch.segment_ids)), context.learner.mesh
    batch = put(batch, mesh, PartitionSpec(None, BATCH_AXES))
    return batch, put(np.int32(count), mesh), index, tokens
