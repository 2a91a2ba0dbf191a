"""The products of ``grouped_matmul`` as TPU kernels.

A step of the grid is one (group, tile of rows) pair in which they meet; the pairs are listed beforehand,
group after group, and the grid is as long as the list (as in MegaBlocks, arXiv:2211.15841). A group's
matrix therefore stays in VMEM while its rows go by, and a tile of rows while its groups do: each is read once
per block of the result's columns. Within a tile only the pieces, as many rows as the matrix unit is wide,
that hold rows of the group are multiplied, so what is computed for nothing is at most one piece per group.

Sums are float32. int8 matrices are multiplied as they are, in the dtype of the rows, and their scales come in
with the result: they are read as int8 and never written out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl.ops.chip import Target
from jaxrl.ops.matrices import Matrices, Products

TILE = 512
"""Rows that are moved at a time."""


def products(chip: Target) -> Products:
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
    begin: jax.Array
    """[cores] first pair of each core."""
    pairs: jax.Array
    """[cores] pairs of each core."""


def _list_work(
    sizes: jax.Array, num_rows: int, tile: int, *, cores: int = 1, empty: bool = False
) -> tuple[_Work, jax.Array]:
    """The pairs, shared out so that no tile is worked on by two cores, and the most that one has. ``empty``:
    also a pair for each group without rows."""
    groups, tiles = len(sizes), num_rows // tile
    end = jnp.cumsum(sizes)
    first = end - sizes
    count = jnp.where(sizes > 0, (end - 1) // tile - first // tile + 1, int(empty))
    ends = jnp.cumsum(count)
    item = jnp.arange(tiles + groups - (0 if empty else 1))
    group = jnp.minimum(jnp.searchsorted(ends, item, side="right", method="compare_all"), groups - 1)
    # Counted back from the end of the group's pairs.
    at = (jnp.maximum(end, 1) - 1)[group] // tile - (ends[group] - 1 - item)
    at = jnp.clip(at, 0, tiles - 1)
    begin = jnp.stack([jnp.sum(at < tiles * c // cores) for c in range(cores)])
    counts = jnp.diff(begin, append=ends[-1])
    work = _Work(group, at, first, end, begin, counts)
    return _Work(*(x.astype(jnp.int32) for x in work)), counts.max().astype(jnp.int32)


def _flipped(shape: tuple[int, ...]) -> bool:
    """Return whether XLA keeps matrices [..., K, N] transposed: a dimension that fills 128 lanes lies last.

    They are handed over so, or they would be copied.
    """
    return shape[-1] % 128 != 0 and shape[-2] % 128 == 0


def _forward(rows, matrices: Sequence[Matrices], sizes, *, chip: Target):
    scales = [m.scale for m in matrices if m.scale is not None]
    return _multiply([rows], [m.values for m in matrices], scales, sizes, over=1, chip=chip)


def _rows(grads, matrices: Sequence[Matrices], sizes, *, chip: Target):
    (out,) = _multiply(grads, [m.values for m in matrices], [], sizes, over=2, chip=chip)
    return out


def _multiply(rows, values, scales, sizes, *, over: int, chip: Target) -> list[jax.Array]:
    """Products of ``rows`` [M, W] with matrices that are summed over their axis ``over``: of one array of
    rows with each set of them, or of as many arrays as sets, added up."""
    length, width = rows[0].shape
    if _flipped(values[0].shape):
        values, over = [v.swapaxes(1, 2) for v in values], 3 - over
    columns = values[0].shape[3 - over]
    rows = [_padded(x, chip.matrix_unit) for x in rows]
    itemsize, stored, count = rows[0].dtype.itemsize, values[0].dtype.itemsize, len(values)
    outs = count - len(rows) + 1

    def needed(tile, block):
        moved = tile * (len(rows) * width + outs * block) * itemsize + count * block * width * stored
        converted = width * block * itemsize if stored < itemsize else 0
        return 2 * moved + converted + 8 * chip.matrix_unit * block

    padded = len(rows[0])
    tile, block = _blocks(padded, columns, needed, chip)
    cores = min(chip.cores, padded // tile)
    work, pairs = _list_work(sizes, padded, tile, cores=cores)

    def here(of, at):
        def index(c, n, i, group, tile, first, end, begin, pairs):
            pair = begin[c] + jnp.minimum(i, pairs[c] - 1)
            return at(group[pair] if of == "group" else tile[pair], n)

        return index

    row_spec = pl.BlockSpec((tile, width), here("tile", lambda t, n: (t, 0)))
    matrix_spec = (
        pl.BlockSpec((1, width, block), here("group", lambda g, n: (g, 0, n)))
        if over == 1
        else pl.BlockSpec((1, block, width), here("group", lambda g, n: (g, n, 0)))
    )
    scale_spec = pl.BlockSpec((1, 1, block), here("group", lambda g, n: (g, 0, n)))
    size, blocks = columns * width * count, pl.cdiv(columns, block)
    results = pl.pallas_call(
        functools.partial(_multiply_kernel, rows=len(rows), matrices=count, over=over, mxu=chip.matrix_unit),
        name="grouped_matmul",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(cores, blocks, pairs),
            in_specs=[row_spec] * len(rows) + [matrix_spec] * count + [scale_spec] * len(scales),
            out_specs=[pl.BlockSpec((tile, block), here("tile", lambda t, n: (t, n)))] * outs,
        ),
        out_shape=[jax.ShapeDtypeStruct((padded, columns), rows[0].dtype)] * outs,
        cost_estimate=pl.CostEstimate(
            flops=2 * _computed_rows(padded, sizes, chip.matrix_unit) * size,
            transcendentals=0,
            bytes_accessed=min(len(sizes), length) * size * stored
            + padded * itemsize * (blocks * len(rows) * width + outs * columns),
        ),
        **_compiler(needed(tile, block), chip, "arbitrary", "arbitrary"),
    )(*work, *rows, *values, *scales)
    return [out[:length] for out in results]


def _multiply_kernel(group, tile, first, end, begin, pairs, *refs, rows, matrices, over, mxu):
    inputs, values = refs[:rows], refs[rows : rows + matrices]
    rest = refs[rows + matrices :]
    outs = rest[-(matrices - rows + 1) :]
    scales = rest[: -len(outs)]
    core, i = pl.program_id(0), pl.program_id(2)
    size = len(inputs[0])

    def piece(here, mine):
        xs = [x[here, :] for x in inputs]
        ys = [_dot(xs[j % rows], v[0].astype(xs[0].dtype), ((1,), (over - 1,))) for j, v in enumerate(values)]
        if scales:
            ys = [y * scale[0] for y, scale in zip(ys, scales, strict=True)]
        for y, out in zip(ys if len(outs) > 1 else [sum(ys)], outs, strict=True):
            out[here, :] = jnp.where(mine, y.astype(out.dtype), out[here, :])

    @pl.when(i < pairs[core])
    def _():
        pair = begin[core] + i
        _each_piece(piece, group[pair], tile[pair] * size, first, end, size, mxu)


def _matrices(rows, grads, sizes, *, chip: Target):
    count, flip = len(grads), _flipped((rows.shape[1], grads[0].shape[1]))
    # out = transposed left . right; there are several of one of them, and the grads are those.
    left, right = (grads, [rows]) if flip else ([rows], grads)
    left, right = [_padded(x, chip.matrix_unit) for x in left], [_padded(x, chip.matrix_unit) for x in right]
    high, wide = left[0].shape[1], right[0].shape[1]
    length, itemsize = len(left[0]), rows.dtype.itemsize
    split_wide = wide > high

    def needed(tile, block):
        h, w = (high, block) if split_wide else (block, wide)
        moved = tile * (len(left) * h + len(right) * w) + count * h * w
        return 2 * moved * itemsize + 4 * (count + 1) * h * w

    split = max(high, wide)
    tile, block = _blocks(length, split, needed, chip, parts=chip.cores)
    h, w = (high, block) if split_wide else (block, wide)
    work, pairs = _list_work(sizes, length, tile, empty=True)

    def spec(width, moves):
        return pl.BlockSpec((tile, width), lambda n, i, group, at, *_: (at[i], n if moves else 0))

    def out_index(n, i, group, *_):
        return (group[i], 0, n) if split_wide else (group[i], n, 0)

    blocks = pl.cdiv(split, block)
    moved = len(left) * high * (1 if not split_wide else blocks)
    moved += len(right) * wide * (blocks if not split_wide else 1)
    results = pl.pallas_call(
        functools.partial(_matrices_kernel, left=len(left), count=count, mxu=chip.matrix_unit),
        name="grouped_matmul_matrices",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(blocks, pairs),
            in_specs=[spec(h, not split_wide)] * len(left) + [spec(w, split_wide)] * len(right),
            out_specs=[pl.BlockSpec((1, h, w), out_index)] * count,
            scratch_shapes=[pltpu.VMEM((h, w), jnp.float32)] * count,
        ),
        out_shape=[jax.ShapeDtypeStruct((len(sizes), high, wide), rows.dtype)] * count,
        cost_estimate=pl.CostEstimate(
            flops=2 * _computed_rows(length, sizes, chip.matrix_unit) * high * wide * count,
            transcendentals=0,
            bytes_accessed=(len(sizes) * high * wide * count + length * moved) * itemsize,
        ),
        **_compiler(needed(tile, block), chip, "arbitrary"),
    )(*work, *left, *right)
    return [x.swapaxes(1, 2) for x in results] if flip else list(results)


def _matrices_kernel(group, tile, first, end, begin, pairs, *refs, left, count, mxu):
    inputs, outs, sums = refs[: count + 1], refs[count + 1 : 2 * count + 1], refs[2 * count + 1 :]
    lefts, rights = inputs[:left], inputs[left:]
    i, last = pl.program_id(1), pl.num_programs(1) - 1
    size = len(inputs[0])

    @pl.when((i == 0) | (group[jnp.maximum(i - 1, 0)] != group[i]))
    def _():
        for total in sums:
            total[...] = jnp.zeros_like(total)

    def piece(here, mine):
        # Masking one of the two is enough.
        xs = [x[here, :] for x in lefts]
        ys = [jnp.where(mine, y[here, :], jnp.zeros((), y.dtype)) for y in rights]
        for j, total in enumerate(sums):
            total[...] += _dot(xs[j % len(xs)], ys[j % len(ys)], ((0,), (0,)))

    _each_piece(piece, group[i], tile[i] * size, first, end, size, mxu)

    @pl.when((i == last) | (group[jnp.minimum(i + 1, last)] != group[i]))
    def _():
        for total, out in zip(sums, outs, strict=True):
            out[0] = total[...].astype(out.dtype)


# ---- common to the kernels ----


def _each_piece(body, group, offset, first, end, size, rows):
    """``body(where a piece is, [rows, 1] which of its rows are the group's)`` for each piece that has some,
    in the tile of ``size`` rows from ``offset`` on."""
    start, stop = first[group] - offset, end[group] - offset

    def step(p, _):
        at = pl.multiple_of(p * rows, rows)
        index = at + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        body(pl.ds(at, rows), (index >= start) & (index < stop))

    begin = lax.div(jnp.maximum(start, 0), rows)
    upto = lax.div(jnp.minimum(stop, size) + rows - 1, rows)
    lax.fori_loop(begin, jnp.where(stop > start, upto, begin), step, None)


def _dot(a, b, contracting):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (contracting, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _padded(x, piece: int):
    """To whole pieces."""
    return jnp.pad(x, ((0, -len(x) % piece), (0, 0)))


def _blocks(rows: int, columns: int, needed, chip: Target, parts: int = 1) -> tuple[int, int]:
    """Rows of a tile, and of ``columns`` those of a block, at least ``parts`` of them where there are lanes
    of 128 enough: the largest that fit."""
    tiles = [t for t in (TILE, TILE // 2, chip.matrix_unit) if rows % t == 0]
    widest = columns if parts == 1 or columns <= 128 else -(-columns // (128 * parts)) * 128
    for block in [widest] + [b for b in (2048, 1024, 512, 256, 128) if b < widest]:
        for tile in tiles:
            if 1.1 * needed(tile, block) <= chip.vmem_bytes:
                return tile, block
    raise ValueError(f"groups of {columns} columns are too large for the kernels' VMEM")


def _computed_rows(rows: int, sizes, piece: int) -> int:
    """At most: whole pieces, and one more for each further group."""
    return rows + piece * (min(len(sizes), rows) - 1)


def _compiler(needed: int, chip: Target, *inner: Literal["arbitrary"]) -> dict[str, Any]:
    """The first dimension of the grid is what the cores share."""
    params = pltpu.CompilerParams(
        dimension_semantics=("parallel", *inner), vmem_limit_bytes=max(int(1.1 * needed), 16 * 2**20)
    )
    return {"compiler_params": params, "interpret": chip.interpret}
