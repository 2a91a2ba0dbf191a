"""Products of groups of rows, each group with a matrix of its own: what experts and their gradients are made
of.

Rows [M, K] are sorted by group; ``sizes`` [E] int32 says how many rows each group has and adds up to M. The
three products take several sets of matrices for one set of rows, so that the rows are read once:

    forward    out_j  = rows . matrices_j                     [M, N]
    rows       d_rows = sum_j d_out_j . transposed matrices_j [M, K]
    matrices   d_matrices_j = transposed rows . d_out_j       [E, K, N], 0 for an empty group

``xla`` is ``jax.lax.ragged_dot``. The TPU compiler makes that a grouped kernel too, but copies the matrices
to transpose them for ``rows``, and computes ``matrices`` for every pair of row and group, so on TPU there are
kernels of our own (``pallas``).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxrl.ops.chip import platform, target_of
from jaxrl.ops.matrices import Matrices, Products

Implementation = Literal["xla", "pallas"]


def products(mesh: Mesh | None, implementation: Implementation | None) -> Products:
    """For the devices of ``mesh``. ``None``: ``pallas`` on TPU, else ``xla``; ``pallas`` is interpreted off
    TPU. ValueError for another name."""
    implementation = implementation or ("pallas" if platform(mesh) == "tpu" else "xla")
    if implementation == "xla":
        return _XLA
    if implementation != "pallas":
        raise ValueError(f"implementation {implementation!r}: needs xla, pallas or None")
    from jaxrl.ops import grouped_matmul_tpu as tpu  # half a second that only TPU needs

    return tpu.products(target_of(mesh))


def _whole(matrices: Matrices, dtype) -> jax.Array:
    values, scale = matrices
    return (values if scale is None else values * scale).astype(dtype)


def _forward(rows, matrices, sizes):
    return [lax.ragged_dot(rows, _whole(m, rows.dtype), sizes) for m in matrices]


def _rows(grads, matrices, sizes):
    parts = [
        lax.ragged_dot(g, _whole(m, g.dtype).swapaxes(1, 2), sizes)
        for g, m in zip(grads, matrices, strict=True)
    ]
    return jnp.sum(jnp.stack(parts), axis=0) if len(parts) > 1 else parts[0]


_ACROSS_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


def _matrices(rows, grads, sizes):
    return [lax.ragged_dot_general(rows, g, sizes, _ACROSS_ROWS) for g in grads]


_XLA = Products(_forward, _rows, _matrices)
