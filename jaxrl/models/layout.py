"""From the rows of a batch to the rows of attention and back, where a group's prompt is held once
(``batch.AttentionLayout``).

Both directions, and their gradients, are gathers along a row; the gradients of a prompt's copies are added up
by one small matrix product over pages. Scatters, which CPUs and TPUs do element by element, do not occur.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.types import AttentionLayout


@jax.custom_vjp
def expand(x: jax.Array, layout: AttentionLayout) -> jax.Array:
    """[R, T, ...] -> [R * A, Ta, ...]: each prompt copied in front of its completions, 0 at padding."""
    rows, count, length = layout.source.shape
    return take(x, layout.source.reshape(rows, -1)).reshape(rows * count, length, *x.shape[2:])


def _expand_bwd(layout: AttentionLayout, grad: jax.Array) -> tuple[jax.Array, None]:
    rows, count, length = layout.source.shape
    grad = grad.reshape(rows, count * length, *grad.shape[2:])
    counted = _counted(layout)
    here = counted == jnp.arange(count * length)
    copies = jnp.where(_like(here, grad), 0, grad).reshape(rows, count * length // layout.page, -1)
    # Copies of a prompt lie alike in their pages: page -> the page of the copy that counts.
    onto = jax.nn.one_hot(counted[:, :: layout.page] // layout.page, copies.shape[1], dtype=grad.dtype)
    total = jnp.einsum("rco,rcf->rof", onto, copies, preferred_element_type=jnp.float32)
    grad = grad + total.reshape(grad.shape).astype(grad.dtype)
    return take(grad, layout.back), None


expand.defvjp(lambda x, layout: (expand(x, layout), layout), _expand_bwd)


@jax.custom_vjp
def collapse(y: jax.Array, layout: AttentionLayout) -> jax.Array:
    """[R * A, Ta, ...] -> [R, T, ...]: of the copies of a prompt one counts."""
    rows = layout.source.shape[0]
    return take(y.reshape(rows, -1, *y.shape[2:]), layout.back)


def _collapse_bwd(layout: AttentionLayout, grad: jax.Array) -> tuple[jax.Array, None]:
    rows, count, length = layout.source.shape
    here = _counted(layout) == jnp.arange(count * length)
    source = jnp.where(here, layout.source.reshape(rows, -1), grad.shape[1])
    return take(grad, source).reshape(rows * count, length, *grad.shape[2:]), None


collapse.defvjp(lambda y, layout: (collapse(y, layout), layout), _collapse_bwd)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [R, T, ...], index [R, S] -> [R, S, ...]; 0 where an index is T."""
    return jax.vmap(lambda row, i: row.at[i].get(mode="fill", fill_value=0))(x, index)


def _counted(layout: AttentionLayout) -> jax.Array:
    """[R, A * Ta]: place of the copy that counts, for each token; -1 for padding."""
    source = layout.source.reshape(layout.source.shape[0], -1)
    return jax.vmap(lambda back, i: back.at[i].get(mode="fill", fill_value=-1))(layout.back, source)


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
