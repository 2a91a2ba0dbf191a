"""The kernels of ``token_log_probs_tpu``: pieces of a block in loops, logits in VMEM only.

Their arguments: ``x`` a block of the hidden states, ``w`` of the head, ``target`` and ``token`` the targets
and ``Cotangents`` of its tokens, ``scalars`` (tokens of the mask, rows of the head that are real ids).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxrl.ops.token_log_probs_chunked import MASKED, Softmax

ROWS, COLUMNS, WIDTH = 256, 512, 1024
"""A block is worked on in pieces, in loops: logits of 256 rows, made from 512 columns at a time, and sums of
up to 1024 of the D columns at a time. Larger pieces keep the matrix units busier and take longer to compile
(the loops' bodies are unrolled: minutes for a whole block)."""


def forward_kernel(scalars, x_ref, w_ref, target_ref, out_ref, *refs, softmax, gradient, tail, limited):
    if gradient:
        jacobian_ref, logits_ref, state_ref, acc_ref, p_ref = refs
    else:
        logits_ref, state_ref = refs
    i, j, last = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1
    first = j * len(w_ref)

    @pl.when(j == 0)
    def _():
        state_ref[...] = jnp.zeros_like(state_ref)
        state_ref[:, 0:1] = jnp.full((len(x_ref), 1), MASKED)
        if gradient:
            acc_ref[...] = jnp.zeros_like(acc_ref)

    _zero_tail(w_ref, tail, j == last)

    def rows(here):
        _products(logits_ref, x_ref, here, w_ref)
        logits = _logits(logits_ref[...], softmax)
        slope = slope_of_cap(logits, softmax)
        ids = lax.broadcasted_iota(jnp.int32, (1, len(w_ref)), 1)
        if limited:
            logits = jnp.where(ids < scalars[1] - first, logits, MASKED)
        hit = ids == target_ref[here, :] - first
        old = state_ref[here, 0:1]
        new = jnp.maximum(old, jnp.max(logits, axis=1, keepdims=True))
        p, decay = jnp.exp(logits - new), jnp.exp(old - new)
        state_ref[here, 0:1] = new
        state_ref[here, 1:2] = state_ref[here, 1:2] * decay + jnp.sum(p, axis=1, keepdims=True)
        state_ref[here, 2:3] = state_ref[here, 2:3] * decay + jnp.sum(p * logits, axis=1, keepdims=True)
        state_ref[here, 3:4] += jnp.sum(jnp.where(hit, logits, 0.0), axis=1, keepdims=True)
        if gradient:
            p_ref[...] = (p * slope).astype(p_ref.dtype)
            _accumulate(acc_ref, here, p_ref, w_ref, decay)

    each_piece(rows, len(x_ref), scalars[0] - i * len(x_ref))

    @pl.when(j == last)
    def _():
        out_ref[...] = state_ref[...]
        if gradient:

            def finish(here):
                scale = 1 / (softmax.temperature * jnp.maximum(state_ref[here, 1:2], 1e-30))
                jacobian_ref[here, :] = (acc_ref[here, :] * scale).astype(jacobian_ref.dtype)

            each_piece(finish, len(x_ref), len(x_ref))


def head_kernel(
    scalars,
    x_ref,
    w_ref,
    target_ref,
    token_ref,
    out_ref,
    acc_ref,
    logits_ref,
    d_ref,
    *,
    softmax,
    slope,
    limited,
):
    """Logits are transposed here, [vocabulary, tokens], as the product with the hidden states wants them."""
    j, i, last = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1

    @pl.when(i == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def rows(here):
        _products(logits_ref, w_ref, here, x_ref)
        logits = _logits(logits_ref[...], softmax)
        ids = j * len(w_ref) + here.start + lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0)
        values = [token_ref[k : k + 1, :] for k in range(3 + slope)]
        d = _logit_gradient(logits, ids == target_ref[...], *values, softmax=softmax)
        d = jnp.where(ids < scalars[1], d, 0.0) if limited else d
        d_ref[...] = d.astype(d_ref.dtype)
        _accumulate(acc_ref, here, d_ref, x_ref)

    each_piece(rows, len(w_ref), len(w_ref))

    @pl.when(i == last)
    def _():
        _copy(out_ref, acc_ref)


def hidden_kernel(
    scalars,
    x_ref,
    w_ref,
    target_ref,
    token_ref,
    out_ref,
    acc_ref,
    logits_ref,
    d_ref,
    *,
    softmax,
    slope,
    tail,
    limited,
):
    i, j, last = pl.program_id(0), pl.program_id(1), pl.num_programs(1) - 1

    @pl.when(j == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    _zero_tail(w_ref, tail, j == last)

    def rows(here):
        _products(logits_ref, x_ref, here, w_ref)
        logits = _logits(logits_ref[...], softmax)
        ids = j * len(w_ref) + lax.broadcasted_iota(jnp.int32, (1, len(w_ref)), 1)
        values = [token_ref[here, k : k + 1] for k in range(3 + slope)]
        d = _logit_gradient(logits, ids == target_ref[here, :], *values, softmax=softmax)
        d = jnp.where(ids < scalars[1], d, 0.0) if limited else d
        d_ref[...] = d.astype(d_ref.dtype)
        _accumulate(acc_ref, here, d_ref, w_ref)

    each_piece(rows, len(x_ref), scalars[0] - i * len(x_ref))

    @pl.when(j == last)
    def _():
        _copy(out_ref, acc_ref)


def _logits(products, softmax: Softmax):
    if softmax.soft_cap is None:
        return products * (1 / softmax.temperature)
    return jnp.tanh(products * (1 / softmax.soft_cap)) * (softmax.soft_cap / softmax.temperature)


def slope_of_cap(logits, softmax: Softmax):
    """d capped product / d product."""
    if softmax.soft_cap is None:
        return 1.0
    return 1.0 - jnp.square(logits * (softmax.temperature / softmax.soft_cap))


def _logit_gradient(logits, hit, lse, target, base, slope=None, *, softmax: Softmax):
    """See ``Cotangents``; with respect to the products."""
    factor = base if slope is None else base + slope * logits
    d = -jnp.exp(logits - lse) * factor
    d = jnp.where(hit, d + target, d) * (1 / softmax.temperature)
    return d * slope_of_cap(logits, softmax)


def _products(out_ref, a_ref, here, b_ref):
    """a[here] . b^T"""

    def columns(c, _):
        those = pl.ds(pl.multiple_of(c * COLUMNS, COLUMNS), COLUMNS)
        out_ref[:, those] = _dot(a_ref[here, :], b_ref[those, :], ((1,), (1,)))
        return _

    lax.fori_loop(0, len(b_ref) // COLUMNS, columns, 0)


def _accumulate(acc_ref, here, a_ref, b_ref, decay=None):
    """acc[here] = decay * acc[here] + a . b"""
    width = b_ref.shape[1]
    size = next((n for n in range(WIDTH, 0, -128) if width % n == 0), width)

    def columns(c, _):
        those = pl.ds(pl.multiple_of(c * size, size), size)
        acc = acc_ref[here, those]
        acc = acc if decay is None else acc * decay
        acc_ref[here, those] = acc + _dot(a_ref[...], b_ref[:, those], ((1,), (0,)))
        return _

    lax.fori_loop(0, width // size, columns, 0)


def _dot(a, b, contract):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def each_piece(body, size, used):
    """``body(slice)`` for the pieces of a block of ``size`` rows that hold some of its ``used`` first."""

    def piece(r, _):
        body(pl.ds(pl.multiple_of(r * ROWS, ROWS), ROWS))
        return _

    lax.fori_loop(0, jnp.minimum(size // ROWS, pl.cdiv(used, ROWS)), piece, 0)


def _copy(out_ref, acc_ref):
    """In pieces, as the whole would take the room of another block."""

    def piece(here):
        out_ref[here, :] = acc_ref[here, :].astype(out_ref.dtype)

    each_piece(piece, len(out_ref), len(out_ref))


def _zero_tail(w_ref, tail, condition):
    """Rows of the last block beyond the array hold anything, NaN too, which 0 * p would not remove."""
    if not tail:
        return

    @pl.when(condition)
    def _():
        whole = -(-tail // ROWS) * ROWS
        start = whole - ROWS
        kept = lax.broadcasted_iota(jnp.int32, (ROWS, 1), 0) < tail - start
        piece = jnp.where(kept, w_ref[start:whole].astype(jnp.float32), 0.0)
        w_ref[start:whole] = piece.astype(w_ref.dtype)
        if whole < len(w_ref):
            w_ref[whole:] = jnp.zeros((len(w_ref) - whole, w_ref.shape[1]), w_ref.dtype)
