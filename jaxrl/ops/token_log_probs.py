"""Log-probs and entropies of given tokens from hidden states and the output head, without a [B, T, V] array.

    logits_v   = cap(hidden . head_v) / temperature        cap(x) = soft_cap * tanh(x / soft_cap), Gemma 2
    log_prob   = logits_target - logsumexp(logits)
    entropy    = logsumexp(logits) - sum_v softmax(logits)_v logits_v

``reference`` writes this down with all logits in memory. ``chunked`` walks over blocks of tokens, recomputes
the logits of a block in the backward pass and adds up the head's gradient in float32. Under a mesh it runs
inside ``shard_map``: rows over (data, fsdp), the vocabulary over tensor, joined by one max and two sums per
token (Megatron-LM, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

Implementation = Literal["reference", "chunked"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", "chunked")

_MASKED = -1e30
"""Logit of an id beyond the vocabulary: finite, so that 0 * logit stays 0 in the entropy."""
_BLOCK_LOGITS = 2**25
"""Float32 logits a block may hold (128 MiB)."""


class _Head(NamedTuple):
    """What turns hidden states into logits; static, hashable."""

    temperature: float
    soft_cap: float | None
    vocab_limit: int | None


def scaled_logits(
    hidden: jax.Array,
    head: jax.Array,
    *,
    temperature: jax.typing.ArrayLike = 1.0,
    soft_cap: float | None = None,
    vocab_limit: int | None = None,
) -> jax.Array:
    """hidden [..., D], head [V, D] -> float32 logits [..., V] / temperature (scalar, or [...] one per row).

    The sampler and every implementation below use this one function. Ids from ``vocab_limit`` on get
    probability 0.
    """
    logits = _cap(_dot(hidden, head), soft_cap) / jnp.asarray(temperature, jnp.float32)[..., None]
    if vocab_limit is None or vocab_limit >= head.shape[0]:
        return logits
    return jnp.where(jnp.arange(head.shape[0]) < vocab_limit, logits, _MASKED)


def log_probs_and_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """logits [..., V] (already divided by the temperature), targets [...] -> log_probs [...], entropy [...],
    in nats."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    entropy = lse - jnp.sum(jnp.exp(logits - lse[..., None]) * logits, axis=-1)
    return target - lse, entropy


def token_log_probs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    vocab_limit: int | None = None,
    mask: jax.Array | None = None,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies (nats, float32, [R, T]) of ``targets`` [R, T] predicted from ``hidden`` [R, T,
    D].

    ``hidden[r, t]`` is the state that predicts ``targets[r, t]``: the shift is the caller's. ``head`` is [V,
    D]. Where ``mask`` [R, T] is False the results and gradients are 0, and ``chunked`` does not compute them.
    With a ``mesh`` the rows must divide over (data, fsdp). ``implementation`` None means ``chunked``.
    """
    implementation = implementation or "chunked"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"token_log_probs: implementation {implementation!r} is not one of {IMPLEMENTATIONS}"
        )
    if mask is None:
        mask = jnp.ones(targets.shape, bool)
    mask = jnp.asarray(mask, bool)
    targets = jnp.where(mask, targets, 0)
    if implementation == "reference":
        logits = scaled_logits(
            hidden, head, temperature=temperature, soft_cap=soft_cap, vocab_limit=vocab_limit
        )
        log_probs, entropy = log_probs_and_entropy(logits, targets)
        return jnp.where(mask, log_probs, 0.0), jnp.where(mask, entropy, 0.0)
    spec = _Head(float(temperature), soft_cap, vocab_limit)
    mesh = None if mesh is None or mesh.size == 1 else mesh
    return _chunked(hidden, head, targets, mask, spec, mesh)


# ---- chunked: one custom_vjp around two shard_map'ed passes, collectives written out
# --------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _chunked(hidden, head, targets, mask, spec, mesh):
    return _chunked_fwd(hidden, head, targets, mask, spec, mesh)[0]


def _chunked_fwd(hidden, head, targets, mask, spec, mesh):
    vocab_axis, rows, vocab = _layout(head, mesh)
    local = functools.partial(_local_forward, spec=spec, vocab_axis=vocab_axis)
    forward = _shard(local, mesh, (rows, vocab, rows, rows), (rows, rows, rows))
    log_probs, entropy, lse = forward(hidden, head, targets, mask)
    return (log_probs, entropy), (hidden, head, targets, mask, entropy, lse)


def _chunked_bwd(spec, mesh, residuals, cotangents):
    hidden, head, *rest = residuals
    vocab_axis, rows, vocab = _layout(head, mesh)
    local = functools.partial(
        _local_backward, spec=spec, vocab_axis=vocab_axis, row_axes=rows[0] if mesh else None
    )
    backward = _shard(local, mesh, (rows, vocab, *[rows] * 6), (rows, vocab))
    # The barrier keeps XLA from merging the recomputed logits with the forward's, which would keep them all.
    hidden, head = lax.optimization_barrier((hidden, head))
    d_hidden, d_head = backward(hidden, head, *rest, *cotangents)
    return d_hidden, d_head, None, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


def _layout(head, mesh):
    """(axis the vocabulary is split over or None, spec of row arrays, spec of the head)."""
    if mesh is None:
        return None, P(), P()
    split = mesh.shape["tensor"] > 1 and head.shape[0] % mesh.shape["tensor"] == 0
    return ("tensor" if split else None), P(("data", "fsdp")), P("tensor" if split else None, None)


def _shard(local, mesh, in_specs, out_specs):
    if mesh is None:
        return local
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _local_forward(hidden, head, targets, mask, *, spec, vocab_axis):
    """One device's rows against its part of the vocabulary -> log_probs, entropy, logsumexp, each [R, T]
    float32."""

    def block(h, target, used):
        logits, _, _ = _block_logits(h, head, spec, vocab_axis)
        top = lax.stop_gradient(jnp.max(logits, axis=-1))
        top = lax.pmax(top, vocab_axis) if vocab_axis else top
        weights = jnp.exp(logits - top[:, None])
        hit = _target_hit(target, head, vocab_axis)
        sums = jnp.stack([weights.sum(-1), (weights * logits).sum(-1), jnp.where(hit, logits, 0.0).sum(-1)])
        total, weighted, chosen = lax.psum(sums, vocab_axis) if vocab_axis else sums
        lse = top + jnp.log(total)
        return jnp.where(used, jnp.stack([chosen - lse, lse - weighted / total, lse]), 0.0)

    arrays, restore = _blocks(hidden, head, mask, targets)
    empty = jnp.zeros((3, arrays[0].shape[1]), jnp.float32)
    out = lax.map(lambda a: lax.cond(jnp.any(a[2]), lambda: block(*a), lambda: empty), arrays)
    return tuple(restore(out[:, i].reshape(-1)) for i in range(3))


def _local_backward(
    hidden, head, targets, mask, entropy, lse, d_log_probs, d_entropy, *, spec, vocab_axis, row_axes
):
    """Gradients of the local rows and of the local part of the head, summed over the other devices that share
    them."""

    def block(h, target, used, ent, lse, g_log_prob, g_entropy):
        logits, capped, inside = _block_logits(h, head, spec, vocab_axis)
        log_p = logits - lse[:, None]
        p = jnp.exp(log_p)
        hit = _target_hit(target, head, vocab_axis).astype(jnp.float32)
        d_logits = g_log_prob[:, None] * (hit - p) - g_entropy[:, None] * p * (log_p + ent[:, None])
        d_raw = jnp.where(inside & used[:, None], d_logits / spec.temperature, 0.0)
        if spec.soft_cap is not None:
            d_raw = d_raw * (1.0 - jnp.square(capped / spec.soft_cap))
        d_raw = d_raw.astype(head.dtype)
        d_h = lax.dot_general(d_raw, head, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        d_w = lax.dot_general(d_raw, h, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return d_h, d_w

    arrays, restore = _blocks(hidden, head, mask, targets, entropy, lse, d_log_probs, d_entropy)

    def step(d_head, a):
        def run():
            d_h, d_w = block(*a)
            return d_head + d_w, d_h

        return lax.cond(jnp.any(a[2]), run, lambda: (d_head, jnp.zeros(a[0].shape, jnp.float32)))

    d_head, d_hidden = lax.scan(step, jnp.zeros(head.shape, jnp.float32), arrays)
    d_hidden = restore(d_hidden.reshape(-1, hidden.shape[-1]))
    if vocab_axis:
        d_hidden = lax.psum(d_hidden, vocab_axis)
    if row_axes:
        d_head = lax.psum(d_head, row_axes)
    return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype)


def _block_logits(h, head, spec: _Head, vocab_axis):
    """Logits of a block [C, V_local], the capped products, and which columns are real ids [1, V_local]."""
    capped = _cap(_dot(h, head), spec.soft_cap)
    inside = jnp.ones((1, head.shape[0]), bool)
    if spec.vocab_limit is not None:
        inside = (_vocab_ids(head, vocab_axis) < spec.vocab_limit)[None, :]
    return jnp.where(inside, capped / spec.temperature, _MASKED), capped, inside


def _vocab_ids(head, vocab_axis):
    offset = lax.axis_index(vocab_axis) * head.shape[0] if vocab_axis else 0
    return offset + jnp.arange(head.shape[0])


def _target_hit(target, head, vocab_axis):
    return target[:, None] == _vocab_ids(head, vocab_axis)[None, :]


def _blocks(hidden, head, mask, targets, *others):
    """Flatten [R, T, ...] to blocks of tokens [n, C, ...], scored tokens first, so that blocks of unscored
    ones are skipped.

    Returns ((hidden, targets, mask, *others) as blocks, restore: [n * C, ...] -> [R, T, ...]).
    """
    rows, length = hidden.shape[:2]
    count = rows * length
    size = 128
    while size < 2048 and 2 * size * head.shape[0] <= _BLOCK_LOGITS:
        size *= 2
    size = min(size, count)
    blocks = -(-count // size)
    order = jnp.argsort(~mask.reshape(-1), stable=True)
    padded = jnp.pad(order, (0, blocks * size - count))
    valid = jnp.arange(blocks * size) < count

    def block(x):
        return jnp.asarray(x).reshape(count, *x.shape[2:])[padded].reshape(blocks, size, *x.shape[2:])

    def restore(x):
        inverse = jnp.argsort(order)
        return x[inverse].reshape(rows, length, *x.shape[1:])

    used = mask.reshape(-1)[padded] & valid
    return (
        (block(hidden), block(targets), used.reshape(blocks, size), *(block(o) for o in others)),
        restore,
    )


def _dot(hidden, head):
    contract = (((hidden.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(hidden, head, contract, preferred_element_type=jnp.float32)


def _cap(logits, soft_cap):
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
