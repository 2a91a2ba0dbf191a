"""From logits to one token a row: temperature, top-k, top-p, min-p, and the draw itself.

The draw takes one uniform number a row and inverts the cumulative distribution, so a token costs one random
number and not one for each id of the vocabulary. Which number a token gets depends on (run seed, stream,
prompt id, sample index, position) alone: step, slots, batch size, order and mesh cannot change it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.mesh.sharding import spec_for
from jaxrl.ops.axes import BATCH_AXES

_BLOCK = 256
_OFF = -jnp.inf
_SMALLEST = 2.0**-24
"""The smallest uniform number: draws tell no smaller probabilities apart."""


TRAIN_STREAM, EVAL_STREAM = 0, 1
"""Streams of prompts: in each of them a prompt id stands for one prompt and is sampled once in a run."""


class Names(NamedTuple):
    """Name the random numbers of B sequences, uint32 [B] each; one for each token follows from its position
    in the completion."""

    seed: Any
    stream: Any
    prompt_id: Any
    sample_index: Any


def key_of(names: Names) -> jax.Array:
    """The key of one sequence, whose names are scalars."""
    key = jax.random.key(names.seed)
    for name in (names.stream, names.prompt_id, names.sample_index):
        key = jax.random.fold_in(key, name)
    return key


class SamplingArrays(NamedTuple):
    """Sampling parameters of B rows, [B] each: float32 temperature (0: greedy), int32 top_k (0: off), float32
    top_p, min_p."""

    temperature: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    top_p: jax.Array | np.ndarray
    min_p: jax.Array | np.ndarray


def filter_logits(logits: jax.Array, params: SamplingArrays) -> jax.Array:
    """logits [B, V], already divided by the temperature -> the same with excluded tokens at -inf.

    In the order of transformers' processors: top-k (ties at the border stay), then top-p of the rest (at
    least one token stays), then min-p.
    """
    vocab = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocab), vocab)
    kth = jnp.take_along_axis(ordered, k[:, None] - 1, axis=-1)
    logits = jnp.where(logits < kth, _OFF, logits)
    # top-p: a token stays while the mass before it, in falling order, is under top_p.
    order = jnp.argsort(-logits, axis=-1, stable=True)
    p = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
    keep_sorted = (jnp.cumsum(p, axis=-1) - p < params.top_p[:, None]) | (params.top_p[:, None] >= 1)
    keep = jnp.zeros_like(keep_sorted).at[jnp.arange(len(order))[:, None], order].set(keep_sorted)
    logits = jnp.where(keep, logits, _OFF)
    p = jax.nn.softmax(logits, axis=-1)
    return jnp.where(p < params.min_p[:, None] * p.max(-1, keepdims=True), _OFF, logits)


def draw(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """One id a row from softmax(logits [B, V]) with uniform [B] in (0, 1): the first id whose cumulative mass
    exceeds it. Ids of probability 0 are never drawn."""
    return _draw(logits, logits.max(axis=-1, keepdims=True), uniform, None)[0]


def _draw(logits, top, uniform, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """``draw``, and the total mass [B] relative to exp(top).

    In two levels, blocks of 256 ids and ids of the block: cheaper than a sum over the vocabulary, and with
    smaller rounding. With ``axis`` the vocabulary is spread over that mesh axis: shards exchange the sums of
    their blocks, and the one block that was hit.
    """
    rows, vocab = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % _BLOCK)), constant_values=_OFF)
    blocks = padded.reshape(rows, -1, _BLOCK)
    count = blocks.shape[1]
    sums = jnp.exp(blocks - top[:, :, None]).sum(-1)
    if axis:
        sums = jax.lax.all_gather(sums, axis, axis=1, tiled=True)
    total = sums.sum(-1)
    block, rest = _invert(sums, uniform * total)
    # Rounded to 0, it would give the block's first id, however improbable.
    rest = jnp.maximum(rest, _SMALLEST * total)
    own = block - (jax.lax.axis_index(axis) * count if axis else 0)
    inside = jnp.take_along_axis(blocks, jnp.clip(own, 0, count - 1)[:, None, None], axis=1)[:, 0]
    inside = jnp.exp(inside - top)
    if axis:
        inside = jax.lax.psum(jnp.where(((own >= 0) & (own < count))[:, None], inside, 0.0), axis)
    offset, _ = _invert(inside, rest)
    return block // count * vocab + block % count * _BLOCK + offset, total


def _invert(mass, target):
    """First index where the cumulative sum of mass [B, n] exceeds target [B], and the rest of target at
    its start. Rounding may put target at or past the total: then the last index that has mass."""
    cumulative = jnp.cumsum(mass, axis=-1)
    index = jnp.sum(cumulative <= target[:, None], axis=-1)
    last = mass.shape[-1] - 1 - jnp.argmax(mass[:, ::-1] > 0, axis=-1)
    index = jnp.minimum(index, last)
    before = jnp.take_along_axis(cumulative - mass, index[:, None], axis=-1)[:, 0]
    return index, jnp.maximum(target - before, 0.0)


def sample(
    logits: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    params: SamplingArrays,
    *,
    filters: bool = True,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Draw one token a row.

    Args:
        logits: float32 [B, V], divided by the temperature (by 1 where it is 0).
        keys: [B] name the sequences; positions [B] count the completion's tokens.
        filters: False: no row asks for top_k, top_p or min_p, and nothing is sorted.
        mesh: rows lie over its batch axes, the vocabulary over tensor when that divides it.

    Returns:
        int32 tokens [B] and float32 log-probs [B] (nats) under the unfiltered distribution.
    """
    local = functools.partial(_sample, filters=filters)
    args = (logits, jax.random.key_data(keys), positions, params)
    if mesh is None or mesh.size == 1:
        return local(*args, axis=None, everywhere=())
    axis = spec_for(["vocab"], logits.shape[1:], mesh)[0]
    rows = P(BATCH_AXES)
    local = functools.partial(local, axis=axis, everywhere=mesh.axis_names)
    specs = (P(BATCH_AXES, axis), rows, rows, rows)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(rows, rows), check_vma=False)(*args)


def _uniform(key_data, position):
    """A multiple of 2^-23, and half of one: never 0, which would draw the first id, nor 1."""
    key = jax.random.fold_in(jax.random.wrap_key_data(key_data), position)
    return jax.random.uniform(key) + _SMALLEST


def _sample(logits, keys, positions, params, *, filters: bool, axis: str | None, everywhere: Sequence[str]):
    """``sample`` on one shard of the mesh; ``everywhere`` are all its axes."""
    uniform = jax.vmap(_uniform)(keys, positions)
    vocab = logits.shape[-1]
    first = jax.lax.axis_index(axis) * vocab if axis else 0
    top = logits.max(axis=-1, keepdims=True)
    greedy = params.temperature <= 0
    best = jax.lax.cond(
        jnp.any(greedy), lambda: first + jnp.argmax(logits, axis=-1), lambda: jnp.zeros(len(logits), int)
    )
    if axis:
        tops = jax.lax.all_gather(top, axis, axis=1, tiled=True)
        best = jax.lax.all_gather(best, axis, axis=1)
        best = jnp.take_along_axis(best, tops.argmax(-1)[:, None], axis=-1)[:, 0]
        top = tops.max(-1, keepdims=True)
    if filters:
        wanted = jnp.any((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
        # The same on every shard, as the filters look at the whole vocabulary.
        wanted = jax.lax.pmax(wanted.astype(int), everywhere) > 0 if everywhere else wanted

        def filtered():
            whole = jax.lax.all_gather(logits, axis, axis=1, tiled=True) if axis else logits
            return jax.lax.dynamic_slice_in_dim(filter_logits(whole, params), first, vocab, 1)

        kept = jax.lax.cond(wanted, filtered, lambda: logits)
        drawn, _ = _draw(kept, top, uniform, axis)
        total = jnp.exp(logits - top).sum(-1)
        total = jax.lax.psum(total, axis) if axis else total
    else:
        drawn, total = _draw(logits, top, uniform, axis)
    tokens = jnp.where(greedy, best, drawn).astype(jnp.int32)
    own = tokens - first
    chosen = jnp.take_along_axis(logits, jnp.clip(own, 0, vocab - 1)[:, None], axis=-1)[:, 0]
    if axis:
        chosen = jax.lax.psum(jnp.where((own >= 0) & (own < vocab), chosen, 0.0), axis)
    return tokens, chosen - top[:, 0] - jnp.log(total)
