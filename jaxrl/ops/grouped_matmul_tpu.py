"""The products of ``grouped_matmul`` as TPU kernels.

A step of the grid is one (group, tile of rows) pair in which they meet; the pairs are listed beforehand,
group after group, and the grid is as long as the list (as in MegaBlocks, arXiv:2211.15841). A group's
matrix therefore stays in VMEM while its rows go by, and a tile of rows while its groups do: each is read once
per block of the result's columns. Within a tile only the pieces of ``PIECE`` rows that hold rows of the group
are multiplied, so what is computed for nothing is at most one piece per group.

Sums are float32. int8 matrices are multiplied as they are, in the dtype of the rows, and their scales come in
with the result: they are read as int8 and never written out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.ops.grouped_matmul import Matrices, Products
from jaxrl.ops.token_log_probs_tpu import Chip, chip_of

__all__ = ["chip_of", "products"]

PIECE = 128
"""Rows of one product."""
TILE = 512
"""Rows that are moved at a time."""


def products(chip: Chip) -> Products:
    """See ``grouped_matmul.products``."""
    return Products(
        functools.partial(_forward, chip=chip),
        functools.partial(_rows, chip=chip),
        functools.partial(_matrices, chip=chip),
    )


class _Work(NamedTuple):
    """The list of pairs, int32, in scalar memory; n is the most there can be."""

    group: jax.Array
    """[n]"""
    tile: jax.Array
    """[n]"""
    first: jax.Array
    """[E] first row of a group."""
    end: jax.Array
    """[E] the row after its last."""


def _list_work(sizes: jax.Array, num_rows: int, tile: int, *, empty: bool) -> tuple[_Work, jax.Array]:
    """The pairs and how many there are; ``empty``: also one for each group without rows."""
    groups, tiles = len(sizes), num_rows // tile
    end = jnp.cumsum(sizes)
    first = end - sizes
    count = jnp.where(sizes > 0, (end - 1) // tile - first // tile + 1, int(empty))
    ends = jnp.cumsum(count)
    item = jnp.arange(tiles + groups - (0 if empty else 1))
    group = jnp.minimum(jnp.searchsorted(ends, item, side="right", method="compare_all"), groups - 1)
    # Counted back from the end of the group's pairs.
    at = (jnp.maximum(end, 1) - 1)[group] // tile - (ends[group] - 1 - item)
    work = _Work(group, jnp.clip(at, 0, tiles - 1), first, end)
    return _Work(*(x.astype(jnp.int32) for x in work)), ends[-1].astype(jnp.int32)


def _forward(rows, matrices: Sequence[Matrices], sizes, *, chip: Chip):
    (_, width), columns = rows.shape, matrices[0].values.shape[2]
    rows, length = _padded(rows), len(rows)
    itemsize, stored = rows.dtype.itemsize, matrices[0].values.dtype.itemsize
    count = len(matrices)

    def needed(tile, block):
        moved = tile * width * itemsize + count * block * (width * stored + tile * itemsize)
        converted = width * block * itemsize if stored < itemsize else 0
        return 2 * moved + converted + 4 * PIECE * block

    tile, block = _blocks(len(rows), columns, needed, chip)
    work, pairs = _list_work(sizes, len(rows), tile, empty=False)
    arrays, specs = [rows], [pl.BlockSpec((tile, width), lambda n, i, group, at, *_: (at[i], 0))]
    for m in matrices:
        arrays.append(m.values)
        specs.append(pl.BlockSpec((1, width, block), lambda n, i, group, *_: (group[i], 0, n)))
    for m in matrices:
        if m.scale is not None:
            arrays.append(m.scale)
            specs.append(pl.BlockSpec((1, 1, block), lambda n, i, group, *_: (group[i], 0, n)))
    size = columns * width * count
    outs = pl.pallas_call(
        functools.partial(_forward_kernel, count=count),
        name="grouped_matmul",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(pl.cdiv(columns, block), pairs),
            in_specs=specs,
            out_specs=[pl.BlockSpec((tile, block), lambda n, i, group, at, *_: (at[i], n))] * count,
        ),
        out_shape=[jax.ShapeDtypeStruct((len(rows), columns), rows.dtype)] * count,
        cost_estimate=pl.CostEstimate(
            flops=2 * _computed_rows(len(rows), sizes) * size,
            transcendentals=0,
            bytes_accessed=min(len(sizes), length) * size * stored
            + len(rows) * itemsize * (pl.cdiv(columns, block) * width + count * columns),
        ),
        **_compiler(needed(tile, block), chip),
    )(*work, *arrays)
    return [out[:length] for out in outs]


def _forward_kernel(group, tile, first, end, rows, *refs, count):
    values, scales, outs = refs[:count], refs[count:-count], refs[-count:]
    i = pl.program_id(1)

    def piece(here, mine):
        x = rows[here, :]
        for j, (value, out) in enumerate(zip(values, outs, strict=True)):
            y = _dot(x, value[0].astype(x.dtype), ((1,), (0,)))
            if scales:
                y = y * scales[j][0]
            out[here, :] = jnp.where(mine, y.astype(out.dtype), out[here, :])

    _each_piece(piece, group[i], tile[i] * len(rows), first, end, len(rows))


def _rows(grads, matrices: Sequence[Matrices], sizes, *, chip: Chip):
    columns, width = matrices[0].values.shape[1:]
    length = len(grads[0])
    grads = [_padded(g) for g in grads]
    itemsize, count = grads[0].dtype.itemsize, len(grads)

    def needed(tile, block):
        moved = count * (tile + block) * width + tile * block
        return 2 * moved * itemsize + 8 * PIECE * block

    tile, block = _blocks(len(grads[0]), columns, needed, chip)
    work, pairs = _list_work(sizes, len(grads[0]), tile, empty=False)
    size = columns * width * count
    out = pl.pallas_call(
        functools.partial(_rows_kernel, count=count),
        name="grouped_matmul_rows",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(pl.cdiv(columns, block), pairs),
            in_specs=[pl.BlockSpec((tile, width), lambda n, i, group, at, *_: (at[i], 0))] * count
            + [pl.BlockSpec((1, block, width), lambda n, i, group, *_: (group[i], n, 0))] * count,
            out_specs=pl.BlockSpec((tile, block), lambda n, i, group, at, *_: (at[i], n)),
        ),
        out_shape=jax.ShapeDtypeStruct((len(grads[0]), columns), grads[0].dtype),
        cost_estimate=pl.CostEstimate(
            flops=2 * _computed_rows(len(grads[0]), sizes) * size,
            transcendentals=0,
            bytes_accessed=min(len(sizes), length) * size * itemsize
            + len(grads[0]) * itemsize * (pl.cdiv(columns, block) * count * width + columns),
        ),
        **_compiler(needed(tile, block), chip),
    )(*work, *grads, *(m.values for m in matrices))
    return out[:length]


def _rows_kernel(group, tile, first, end, *refs, count):
    grads, values, out = refs[:count], refs[count:-1], refs[-1]
    i = pl.program_id(1)

    def piece(here, mine):
        y = sum(_dot(g[here, :], v[0], ((1,), (1,))) for g, v in zip(grads, values, strict=True))
        out[here, :] = jnp.where(mine, y.astype(out.dtype), out[here, :])

    _each_piece(piece, group[i], tile[i] * len(out), first, end, len(out))


def _matrices(rows, grads, sizes, *, chip: Chip):
    width, columns = rows.shape[1], grads[0].shape[1]
    rows, grads = _padded(rows), [_padded(g) for g in grads]
    itemsize, count = rows.dtype.itemsize, len(grads)

    def needed(tile, block):
        moved = tile * block + count * (tile + block) * columns
        return 2 * moved * itemsize + 4 * (count + 1) * block * columns

    tile, block = _blocks(len(rows), width, needed, chip)
    work, pairs = _list_work(sizes, len(rows), tile, empty=True)
    out_spec = pl.BlockSpec((1, block, columns), lambda n, i, group, *_: (group[i], n, 0))
    return pl.pallas_call(
        functools.partial(_matrices_kernel, count=count),
        name="grouped_matmul_matrices",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(pl.cdiv(width, block), pairs),
            in_specs=[pl.BlockSpec((tile, block), lambda n, i, group, at, *_: (at[i], n))]
            + [pl.BlockSpec((tile, columns), lambda n, i, group, at, *_: (at[i], 0))] * count,
            out_specs=[out_spec] * count,
            scratch_shapes=[pltpu.VMEM((block, columns), jnp.float32)] * count,
        ),
        out_shape=[jax.ShapeDtypeStruct((len(sizes), width, columns), rows.dtype)] * count,
        cost_estimate=pl.CostEstimate(
            flops=2 * _computed_rows(len(rows), sizes) * width * columns * count,
            transcendentals=0,
            bytes_accessed=len(sizes) * width * columns * count * itemsize
            + len(rows) * itemsize * (width + pl.cdiv(width, block) * count * columns),
        ),
        **_compiler(needed(tile, block), chip),
    )(*work, rows, *grads)


def _matrices_kernel(group, tile, first, end, rows, *refs, count):
    grads, outs, sums = refs[:count], refs[count : 2 * count], refs[2 * count :]
    i, last = pl.program_id(1), pl.num_programs(1) - 1

    @pl.when((i == 0) | (group[jnp.maximum(i - 1, 0)] != group[i]))
    def _():
        for total in sums:
            total[...] = jnp.zeros_like(total)

    def piece(here, mine):
        x = rows[here, :]
        for grad, total in zip(grads, sums, strict=True):
            g = jnp.where(mine, grad[here, :], jnp.zeros((), grad.dtype))
            total[...] += _dot(x, g, ((0,), (0,)))

    _each_piece(piece, group[i], tile[i] * len(rows), first, end, len(rows))

    @pl.when((i == last) | (group[jnp.minimum(i + 1, last)] != group[i]))
    def _():
        for total, out in zip(sums, outs, strict=True):
            out[0] = total[...].astype(out.dtype)


# ---- common to the kernels ----


def _each_piece(body, group, offset, first, end, size):
    """``body(rows of the piece, [PIECE, 1] those of the group)`` for the pieces, with rows of the group, of a
    tile that begins at row ``offset``."""
    start, stop = first[group] - offset, end[group] - offset

    def step(p, _):
        at = pl.multiple_of(p * PIECE, PIECE)
        index = at + lax.broadcasted_iota(jnp.int32, (PIECE, 1), 0)
        body(pl.ds(at, PIECE), (index >= start) & (index < stop))

    begin = lax.div(jnp.maximum(start, 0), PIECE)
    upto = lax.div(jnp.minimum(stop, size) + PIECE - 1, PIECE)
    lax.fori_loop(begin, jnp.where(stop > start, upto, begin), step, None)


def _dot(a, b, contracting):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (contracting, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _padded(x):
    """To whole pieces."""
    return jnp.pad(x, ((0, -len(x) % PIECE), (0, 0)))


def _blocks(rows: int, columns: int, needed, chip: Chip) -> tuple[int, int]:
    """Rows of a tile and columns of the result's blocks: the largest that fit."""
    tiles = [t for t in (TILE, TILE // 2, PIECE) if rows % t == 0]
    blocks = [columns] + [b for b in (2048, 1024, 512, 256, 128) if b < columns]
    for block in blocks:
        for tile in tiles:
            if 1.1 * needed(tile, block) <= chip.vmem_bytes:
                return tile, block
    raise ValueError(f"groups of {columns} columns are too large for the kernels' VMEM")


def _computed_rows(rows: int, sizes) -> int:
    """At most: whole pieces, and one more for each further group."""
    return rows + PIECE * (min(len(sizes), rows) - 1)


def _compiler(needed: int, chip: Chip) -> dict[str, Any]:
    params = pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=max(int(1.1 * needed), 16 * 2**20)
    )
    return {"compiler_params": params, "interpret": chip.interpret}
