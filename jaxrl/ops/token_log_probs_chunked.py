"""The passes over the output head in plain XLA: the path of CPUs and GPUs.

Each works on what one device holds: hidden states [N, D] with the ``count`` wanted ones in front, a part of
the head [V, D], targets [N] as rows of that part (others are elsewhere), and ``limit``, the rows of it that
are real ids. Blocks of tokens go one after the other, blocks after them are never computed, and a block's
logits are the only array with a vocabulary axis.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30
"""Logit of an id beyond the vocabulary: finite, so that 0 * logit stays 0 in the entropy."""
_BLOCK_LOGITS = 2**25
"""Float32 logits a block may hold (128 MiB)."""


class Softmax(NamedTuple):
    """Numbers that turn products of hidden states and head into log-probs; static, hashable."""

    temperature: float
    soft_cap: float | None
    vocab_limit: int | None


class Cotangents(NamedTuple):
    """Gradient of a loss with respect to a token's logits:  hit * target - p * (base + slope * logit).

    Each [N] float32. ``hit`` is 1 at the target, p the softmax exp(logit - log_sum_exp). Unwanted tokens have
    zeros, and a ``log_sum_exp`` that makes p 0.
    """

    log_sum_exp: jax.Array
    target: jax.Array
    base: jax.Array
    slope: jax.Array | None
    """None where the loss does not differentiate the entropies."""


def block_tokens(tokens: int, head) -> int:
    """Tokens of a block: few enough for the memory of its logits, many enough to make good use of the head,
    which is read (and its gradient read and written) once a block."""
    size = 128
    while size < 2048 and 2 * size * len(head) <= _BLOCK_LOGITS:
        size *= 2
    return max(1, min(size, tokens))


def forward(hidden, head, targets, count, limit, softmax: Softmax, gradient: bool):
    """-> (statistics, None). Statistics are float32 [4, N]: max logit, sum of exp(logit - max), the same
    weighted with the logit, target logit (0 if elsewhere); 0, 1, 0, 0 at unwanted blocks. One matrix product,
    ``gradient`` or not."""
    size = block_tokens(len(hidden), head)

    def block(i, out):
        x, target = (lax.dynamic_slice_in_dim(a, i * size, size) for a in (hidden, targets))
        logits, _ = block_logits(x, head, limit, softmax)
        return lax.dynamic_update_slice(out, statistics(logits, target), (0, i * size))

    nothing = jnp.zeros((4, len(hidden)), jnp.float32).at[1].set(1.0)
    return lax.fori_loop(0, -(-count // size), block, nothing), None


def backward(hidden, head, targets, count, limit, softmax: Softmax, cotangents: Cotangents, jacobian):
    """-> gradients of the hidden states [N, D] and of this part of the head [V, D]. Three products, one of
    them the logits again."""
    size = block_tokens(len(hidden), head)

    def block(i, carry):
        d_hidden, d_head = carry
        x, target, ct = jax.tree.map(
            lambda a: lax.dynamic_slice_in_dim(a, i * size, size), (hidden, targets, cotangents)
        )
        logits, capped = block_logits(x, head, limit, softmax)
        d_x, d_w = products(logit_gradient(logits, capped, target, ct, softmax), x, head)
        return lax.dynamic_update_slice(d_hidden, d_x, (i * size, 0)), d_head + d_w

    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(head.shape, jnp.float32)
    return lax.fori_loop(0, -(-count // size), block, zeros)


def block_logits(x, head, limit, softmax: Softmax):
    """Logits [C, V] of a block divided by the temperature, and the capped products they are made of."""
    capped = cap(dot(x, head), softmax.soft_cap)
    logits = capped / softmax.temperature
    if limit is not None:
        logits = jnp.where(jnp.arange(len(head)) < limit, logits, MASKED)
    return logits, capped


def statistics(logits, target):
    """[4, C] as ``forward`` returns it."""
    top = jnp.max(logits, axis=-1)
    weights = jnp.exp(logits - top[:, None])
    here = (target >= 0) & (target < logits.shape[1])
    chosen = jnp.take_along_axis(logits, jnp.where(here, target, 0)[:, None], axis=-1)[:, 0]
    return jnp.stack([top, weights.sum(-1), (weights * logits).sum(-1), jnp.where(here, chosen, 0.0)])


def logit_gradient(logits, capped, target, ct: Cotangents, softmax: Softmax):
    """Gradient with respect to the products hidden . head [C, V], float32."""
    factor = ct.base[:, None]
    if ct.slope is not None:
        factor = factor + ct.slope[:, None] * logits
    hit = target[:, None] == jnp.arange(logits.shape[1])
    gradient = jnp.where(hit, ct.target[:, None], 0.0) - jnp.exp(logits - ct.log_sum_exp[:, None]) * factor
    gradient = gradient / softmax.temperature
    if softmax.soft_cap is None:
        return gradient
    return gradient * (1.0 - jnp.square(capped / softmax.soft_cap))


def products(d_raw, x, head):
    """Gradients of a block's hidden states [C, D] and of the head [V, D], float32."""
    d_raw = d_raw.astype(head.dtype)
    d_x = lax.dot_general(d_raw, head, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    d_w = lax.dot_general(d_raw, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return d_x, d_w


def dot(hidden, head):
    """hidden [..., D], head [V, D] -> float32 [..., V]."""
    contract = (((hidden.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(hidden, head, contract, preferred_element_type=jnp.float32)


def cap(logits, soft_cap):
    """soft_cap * tanh(x / soft_cap), Gemma 2 (arXiv:2408.00118); None: no cap."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
