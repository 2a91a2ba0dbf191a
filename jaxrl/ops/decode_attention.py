"""Attention of one new token a sequence over a kv cache in pages, and the writing of that token.

A sequence's token at position p lies in its page number (p // page) % M, at offset p % page, where M is the
width of its page table: with M pages for all positions nothing is overwritten, with fewer the pages are a
ring that holds the last ones (enough for a sliding window). Page 0 of every shard belongs to nobody: table
entries without a page are 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.ops.attention import attention

Implementation = Literal["reference", "pallas"]


@dataclasses.dataclass(frozen=True)
class Pages:
    """Which pages belong to which sequence, and where they are."""

    tables: Mapping[int | None, jax.Array]
    """For each window (None: all positions are kept) int32 [B, M], numbered within the shard that holds
    them."""
    mesh: Mesh | None = None
    spec: P | None = None
    """Layout of the pages: mesh axes that spread the pages (and, alike, the rows of B), and those of K."""
    implementation: Implementation | None = None
    """``reference`` gathers all M pages of every sequence; ``pallas`` is a TPU kernel that reads the filled
    ones only (elsewhere it is interpreted); None: pallas on a TPU mesh, else reference."""


def decode_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    positions: jax.Array,
    pages: Pages,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """softmax(cap(q k^T scale)) v of each sequence's newest token over its cached ones and itself.

    Args:
        q: [B, N, H]; k, v: [B, K, H] of the new tokens; N is a multiple of K.
        k_pages, v_pages: [pages, K, page, H]; donate them: the new tokens are written in place.
        positions: int32 [B] of the new tokens; negative: no token, its output is 0 and nothing is written.
        window, soft_cap, scale: as in ``attention``; ``pages.tables[window]`` is used.

    Returns:
        [B, N, H] in the dtype of ``q``, and the pages.
    """
    on_tpu = pages.mesh is not None and pages.mesh.devices.flat[0].platform == "tpu"
    implementation = pages.implementation or ("pallas" if on_tpu else "reference")
    if implementation not in ("reference", "pallas"):
        raise ValueError(f"implementation {implementation!r}: needs reference, pallas or None")
    local: Callable
    options: dict[str, Any] = dict(window=window, soft_cap=soft_cap, scale=scale)
    if implementation == "pallas":
        from jaxrl.ops.decode_attention_tpu import paged

        local = functools.partial(paged, **options, interpret=not on_tpu)
    else:
        local = functools.partial(_reference, **options)
    args = (q, k, v, k_pages, v_pages, pages.tables[window], positions)
    if pages.mesh is None or pages.mesh.size == 1:
        return local(*args)
    rows, heads = (*(pages.spec or ()), None, None)[:2]
    both = P(rows, heads)
    specs = (*[both] * 5, P(rows), P(rows))
    # check_vma: outputs of a kernel do not say over which axes they vary.
    return jax.shard_map(local, mesh=pages.mesh, in_specs=specs, out_specs=(both,) * 3, check_vma=False)(
        *args
    )


def ring_positions(newest: jax.Array, length: int) -> jax.Array:
    """Position of the token at each index of a ring of ``length`` that was filled up to ``newest`` [B] ->
    [B, length]; beyond every position where nothing is yet."""
    found = newest[:, None] - (newest[:, None] - jnp.arange(length)) % length
    return jnp.where(found < 0, jnp.iinfo(jnp.int32).max, found)


def _reference(q, k, v, k_pages, v_pages, table, positions, *, window, soft_cap, scale):
    batch, pages = table.shape
    heads, page, dim = k_pages.shape[1:]
    at = jnp.maximum(positions, 0)
    target = jnp.take_along_axis(table, (at // page % pages)[:, None], axis=1)[:, 0]
    target = jnp.where(positions < 0, 0, target)

    def extended(pool, new):
        return pool.at[target, :, at % page].set(new.astype(pool.dtype))

    def rows(pool):
        return pool[table].transpose(0, 1, 3, 2, 4).reshape(batch, pages * page, heads, dim).astype(q.dtype)

    k_pages, v_pages = extended(k_pages, k), extended(v_pages, v)
    y = attention(
        q[:, None],
        rows(k_pages),
        rows(v_pages),
        q_positions=positions[:, None],
        kv_positions=ring_positions(positions, pages * page),
        window=window,
        soft_cap=soft_cap,
        scale=scale,
        implementation="reference",
    )[:, 0]
    return y, k_pages, v_pages
