"""From logits to one token a row: temperature, top-k, top-p, min-p, and the draw itself.

The draw takes one uniform number a row and inverts the cumulative distribution, so a token costs one random
number and not one for each id of the vocabulary. Which number a token gets depends on (run seed, step, prompt
id, sample index, position) alone: slots, batch size, order and mesh cannot change it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 256
_OFF = -jnp.inf


class SamplingArrays(NamedTuple):
    """Sampling parameters of B rows, [B] each: float32 temperature (0: greedy), int32 top_k (0: off), float32
    top_p, min_p."""

    temperature: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    top_p: jax.Array | np.ndarray
    min_p: jax.Array | np.ndarray


def filter_logits(logits: jax.Array, params: SamplingArrays) -> jax.Array:
    """logits [B, V], already divided by the temperature -> the same with excluded tokens at -inf.

    In the order of transformers' processors: top-k (ties at the border stay), then top-p of what is left (at
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


def _kept(mass: jax.Array, logits: jax.Array, params: SamplingArrays) -> jax.Array:
    """``mass`` of the tokens that the filters keep, else 0. Sorting is skipped when no row asks for it."""
    wanted = jnp.any((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
    return jax.lax.cond(
        wanted, lambda: jnp.where(jnp.isfinite(filter_logits(logits, params)), mass, 0.0), lambda: mass
    )


def draw(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """One id a row from softmax(logits [B, V]) with uniform [B] in [0, 1): the first id whose cumulative mass
    exceeds it.

    In two levels, blocks of 256 ids and ids of the block: cheaper than a sum over the vocabulary, and with
    smaller rounding. Ids of probability 0 are never drawn.
    """
    return _draw(jnp.exp(logits - logits.max(axis=-1, keepdims=True)), uniform)


def _draw(mass: jax.Array, uniform: jax.Array) -> jax.Array:
    rows, vocab = mass.shape
    blocks = jnp.pad(mass, ((0, 0), (0, -vocab % _BLOCK))).reshape(rows, -1, _BLOCK)
    block_sum = blocks.sum(-1)
    block, rest = _invert(block_sum, uniform * block_sum.sum(-1))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    offset, _ = _invert(inside, rest)
    return block * _BLOCK + offset


def _invert(mass, target):
    """First index where the cumulative sum of mass [B, n] exceeds target [B], and what of target is left at
    its start. Rounding may put target at or past the total: then the last index that has mass."""
    cumulative = jnp.cumsum(mass, axis=-1)
    index = jnp.sum(cumulative <= target[:, None], axis=-1)
    last = mass.shape[-1] - 1 - jnp.argmax(mass[:, ::-1] > 0, axis=-1)
    index = jnp.minimum(index, last)
    before = jnp.take_along_axis(cumulative - mass, index[:, None], axis=-1)[:, 0]
    return index, jnp.maximum(target - before, 0.0)


def sample(
    logits: jax.Array, keys: jax.Array, positions: jax.Array, params: SamplingArrays
) -> tuple[jax.Array, jax.Array]:
    """Draw one token a row. logits [B, V] are divided by the temperature (by 1 where it is 0), keys [B] name
    the sequences, positions [B] count the completion's tokens. Returns int32 tokens [B] and float32 log-probs
    [B] (nats) under the unfiltered distribution."""
    uniform = jax.vmap(lambda key, t: jax.random.uniform(jax.random.fold_in(key, t)))(keys, positions)
    top = logits.max(axis=-1, keepdims=True)
    mass = jnp.exp(logits - top)  # one exponential a logit serves the draw and the log-prob
    drawn = _draw(_kept(mass, logits, params), uniform)
    greedy = params.temperature <= 0
    best = jax.lax.cond(jnp.any(greedy), lambda: jnp.argmax(logits, axis=-1), lambda: jnp.zeros_like(drawn))
    tokens = jnp.where(greedy, best, drawn).astype(jnp.int32)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - top
    return tokens, chosen[:, 0] - jnp.log(mass.sum(-1))
