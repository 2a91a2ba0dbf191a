"""``decode_attention`` as a TPU kernel that moves the filled pages only.

One step of the grid is one (sequence, page) pair; the pairs are listed beforehand, sequence after sequence,
and the grid is as long as the list. So Pallas's own pipeline fetches the next page while this one is used,
also from one sequence to the next. The softmax is online (Milakov & Gimelshein, arXiv:1805.02867). With a
sequence's last page the new token is put into it, and the few rows around it go back to memory.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


class _Work(NamedTuple):
    """The list of pairs, int32, in scalar memory."""

    row: jax.Array
    """[n] sequence."""
    number: jax.Array
    """[n] page of the sequence: number * page is the position of its first token."""
    page: jax.Array
    """[n] where it lies."""
    positions: jax.Array
    """[B] of the new token; negative: none."""
    target: jax.Array
    """[B] page the new token belongs to."""


def _list_work(table, positions, page: int, window: int | None) -> tuple[_Work, jax.Array]:
    """The pairs, and how many there are (at least one: a grid cannot be empty)."""
    batch, width = table.shape
    last = jnp.where(positions < 0, -1, positions // page)
    first = jnp.zeros_like(last) if window is None else jnp.maximum(positions - window + 1, 0) // page
    ends = jnp.cumsum(jnp.where(positions < 0, 0, last - first + 1))
    item = jnp.arange(batch * width)
    row = jnp.minimum(jnp.searchsorted(ends, item, side="right", method="compare_all"), batch - 1)
    # Counted back from the sequence's end, so that no start has to be kept.
    number = jnp.clip(last[row] - (ends[row] - 1 - item), 0)
    target = table[jnp.arange(batch), jnp.maximum(last, 0) % width]
    target = jnp.where(positions < 0, 0, target)
    pages = jnp.where(positions[row] < 0, 0, table[row, number % width])
    work = _Work(*(x.astype(jnp.int32) for x in (row, number, pages, positions, target)))
    return work, jnp.maximum(ends[-1], 1).astype(jnp.int32)


def paged(q, k, v, k_pages, v_pages, table, positions, *, window, soft_cap, scale, interpret=False):
    """See ``decode_attention``; arrays of one shard."""
    batch, heads, dim = q.shape
    _, kv_heads, page, _ = k_pages.shape
    group = heads // kv_heads
    tile = 32 // k_pages.dtype.itemsize
    work, count = _list_work(table, positions, page, window)
    kernel = functools.partial(_kernel, window=window, soft_cap=soft_cap, scale=scale, tile=tile)
    of_row = lambda i, row, *_: (row[i], 0, 0, 0)  # noqa: E731
    of_page = lambda i, row, number, page, *_: (page[i], 0, 0, 0)  # noqa: E731

    def of_tile(i, row, number, page_, positions, target):
        return target[row[i]], 0, jnp.maximum(positions[row[i]], 0) % page // tile, 0

    per_head = pl.BlockSpec((1, kv_heads, group, dim), of_row)
    one = pl.BlockSpec((1, kv_heads, 1, dim), of_row)
    whole = pl.BlockSpec((1, kv_heads, page, dim), of_page)
    part = pl.BlockSpec((1, kv_heads, tile, dim), of_tile)
    # Pinned to HBM, or the compiler would first copy all pages of a small cache to VMEM. The interpreter does
    # not know memory spaces.
    pinned_shape = jax.ShapeDtypeStruct if interpret else pltpu.HBM
    pinned = functools.partial(pltpu.with_memory_space_constraint, memory_space=pltpu.HBM)
    if interpret:
        pinned = lambda x: x  # noqa: E731
    tokens = batch * min(table.shape[1] * page, (window or 2**31) + page)
    y, k_pages, v_pages = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(count,),
            in_specs=[per_head, one, one, whole, whole],
            out_specs=[per_head, part, part],
            scratch_shapes=[
                pltpu.VMEM((kv_heads, group, 1), jnp.float32),
                pltpu.VMEM((kv_heads, group, 1), jnp.float32),
                pltpu.VMEM((kv_heads, group, dim), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, group, dim), q.dtype),
            *(pinned_shape(x.shape, x.dtype) for x in (k_pages, v_pages)),
        ],
        input_output_aliases={len(work) + 3: 1, len(work) + 4: 2},
        # What full pages would cost: the lengths are not known to the compiler.
        cost_estimate=pl.CostEstimate(
            flops=4 * tokens * heads * dim,
            transcendentals=tokens * heads,
            bytes_accessed=2 * tokens * kv_heads * dim * k_pages.dtype.itemsize
            + 2 * batch * kv_heads * tile * dim * k_pages.dtype.itemsize
            + 2 * batch * (heads + kv_heads) * dim * q.dtype.itemsize,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="decode_attention",
    )(
        *work,
        q.reshape(batch, kv_heads, group, dim),
        k[:, :, None].astype(k_pages.dtype),
        v[:, :, None].astype(v_pages.dtype),
        *map(pinned, (k_pages, v_pages)),
    )
    y = jnp.where(positions[:, None, None] < 0, 0, y.reshape(q.shape))
    return y, k_pages, v_pages


def _kernel(
    row, number, page_of, positions, target, q, k_new, v_new, k_ref, v_ref, y, k_out, v_out, top, total, acc,
    *, window, soft_cap, scale, tile,
):  # fmt: skip
    i = pl.program_id(0)
    b = row[i]
    position = positions[b]
    page = k_ref.shape[2]

    @pl.when((i == 0) | (row[jnp.maximum(i - 1, 0)] != b))
    def _():
        top[...] = jnp.full_like(top, -1e30)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    is_last = number[i] == jnp.maximum(position, 0) // page
    offset = jnp.maximum(position, 0) % page
    here = lax.broadcasted_iota(jnp.int32, (1, page, 1), 1)
    fresh = is_last & (here == offset)
    k = jnp.where(fresh, k_new[0], k_ref[0])
    v = jnp.where(fresh, v_new[0], v_ref[0])
    precision = lax.Precision.HIGHEST if k.dtype == jnp.float32 else None
    scores = lax.dot_general(
        q[0].astype(k.dtype),
        k,
        (((2,), (2,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    scores = scores * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    at = number[i] * page + lax.broadcasted_iota(jnp.int32, (1, 1, page), 2)
    seen = at <= position
    if window is not None:
        seen &= at > position - window
    scores = jnp.where(seen, scores, -1e30)
    new_top = jnp.maximum(top[...], scores.max(-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
    fade = jnp.exp(top[...] - new_top)
    total[...] = total[...] * fade + weights.sum(-1, keepdims=True)
    acc[...] = acc[...] * fade + lax.dot_general(
        weights.astype(v.dtype),
        v,
        (((2,), (1,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    top[...] = new_top

    @pl.when(is_last)
    def _():
        y[0] = (acc[...] / jnp.maximum(total[...], 1e-30)).astype(y.dtype)
        start = pl.multiple_of(offset // tile * tile, tile)
        around = lax.broadcasted_iota(jnp.int32, (1, tile, 1), 1) == offset - start
        k_out[0] = jnp.where(around, k_new[0], k_ref[0, :, pl.ds(start, tile), :])
        v_out[0] = jnp.where(around, v_new[0], v_ref[0, :, pl.ds(start, tile), :])
