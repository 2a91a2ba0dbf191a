"""Causal attention with grouped queries, sliding window, soft cap and packed segments.

A query sees a key of its own segment whose position is at most its own and, with a window of w, larger than
its own minus w. Scores and softmax are float32 whatever the inputs are.

``reference`` holds all scores, ``chunked`` those of a block of queries at a time, also in the backward pass,
and ``pallas`` (``attention_tpu.py``) none at all.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from jaxrl.ops.chip import platform

Implementation = Literal["reference", "chunked", "pallas"]
SAVED = "attention"
"""Name of the result in remat policies."""
BLOCK = 256
"""Queries of one block of ``chunked``."""
LONG = 1024
"""Queries from which ``chunked`` is the default."""


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_positions: jax.Array,
    kv_positions: jax.Array,
    q_segments: jax.Array | None = None,
    kv_segments: jax.Array | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """softmax(cap(q k^T scale)) v under the mask described above.

    Args:
        q: [B, T, N, H].
        k, v: [B, S, K, H]; N is a multiple of K, query head n uses kv head n // (N / K).
        q_positions, kv_positions: int [B, T] and [B, S] (or [1, S]).
        q_segments, kv_segments: int [B, T] and [B, S], both or neither; tokens of different segments do not
            see each other.
        window: tokens a query sees, itself included; None: all earlier ones.
        soft_cap: scores become cap * tanh(scores / cap) (Gemma 2, arXiv:2408.00118).
        mesh: where the arrays lie, and what they are compiled for; only ``pallas`` needs it.
        implementation: None: ``pallas`` on TPU where queries and keys are the same tokens (that is, where
            ``kv_positions`` is ``q_positions``), else ``chunked`` from LONG queries on. ``pallas`` needs such
            tokens, with each segment in one piece and its positions counting up by one; off TPU it is
            interpreted.

    Returns:
        [B, T, N, H] in the dtype of ``v``; zeros for a query that sees nothing.
    """
    rows = kv_positions is q_positions
    if implementation is None:
        if rows and platform(mesh) == "tpu":
            implementation = "pallas"
        else:
            implementation = "chunked" if q.shape[1] >= LONG else "reference"
    if implementation == "pallas":
        if not rows:
            raise ValueError("implementation 'pallas': needs kv_positions to be q_positions")
        from jaxrl.ops.attention_tpu import splash_attention  # half a second that only TPU needs

        return splash_attention(
            q, k, v, q_segments, window=window, soft_cap=soft_cap, scale=scale, mesh=mesh, name=SAVED
        )
    if implementation not in ("reference", "chunked"):
        raise ValueError(f"implementation {implementation!r}: needs reference, chunked, pallas or None")
    if q_segments is None or kv_segments is None:
        q_segments, kv_segments = jnp.zeros_like(q_positions), jnp.zeros_like(kv_positions)

    def block(q: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        visible = (positions[:, :, None] >= kv_positions[:, None, :]) & (
            segments[:, :, None] == kv_segments[:, None, :]
        )
        if window is not None:
            visible &= positions[:, :, None] - kv_positions[:, None, :] < window
        return _attend(q, k, v, visible, soft_cap, scale)

    if implementation == "reference":
        out = block(q, q_positions, q_segments)
    else:
        out = _over_blocks(block, q, q_positions, q_segments)
    return checkpoint_name(out, SAVED)


def _attend(q, k, v, visible, soft_cap, scale):
    """Attention of q [B, T, N, H] over all keys with a mask [B, T, S]."""
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # Batch axes first: the order in which a kv cache lies, so that no key is moved.
    q = q.reshape(batch, length, kv_heads, group, dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, kv_heads, group * length, dim)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    scores = jnp.einsum("bkqh,bksh->bkqs", q, k, preferred_element_type=jnp.float32) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    mask = jnp.tile(visible, (1, group, 1))[:, None]
    # A finite fill and a guarded sum: a query that sees nothing gives 0, not NaN, in value and in gradient.
    scores = jnp.where(mask, scores, -1e30)
    weights = jnp.where(mask, jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True))), 0.0)
    total = jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    out = jnp.einsum("bkqs,bksh->bkqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = (out / total).astype(v.dtype).reshape(batch, kv_heads, group, length, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, dim)


def _over_blocks(block, q, positions, segments):
    """``block`` over BLOCK queries at a time; each block's scores are computed again in the backward pass."""
    batch, length = positions.shape
    count = -(-length // BLOCK)
    padding = count * BLOCK - length

    def split(x, fill):
        pad = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, pad, constant_values=fill)
        return jnp.moveaxis(x.reshape(batch, count, BLOCK, *x.shape[2:]), 1, 0)

    blocks = (split(q, 0), split(positions, -1), split(segments, -1))
    out = jax.lax.map(jax.checkpoint(lambda xs: block(*xs)), blocks)
    return jnp.moveaxis(out, 0, 1).reshape(batch, count * BLOCK, *q.shape[2:])[:, :length]
