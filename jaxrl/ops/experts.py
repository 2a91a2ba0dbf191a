"""Gated MLPs of which each token visits a few: y = sum_k weight_k down_{e_k}(act(gate_{e_k} x) * up_{e_k} x).

A token's visits are rows, sorted by expert and multiplied group by group (``grouped_matmul``), whatever the
load: there is no capacity and nothing is dropped. The router's weights multiply the hidden rows, which come
to the same as multiplying the results and are narrower. To the sorted rows and back there are only gathers,
in the backward pass too: the way there and the way back are each other's transposes.

On a mesh each device does this for its own tokens with its slice of every expert's width, and the slices are
summed over ``tensor``: no token crosses the batch axes. The matrices' gradients are summed to where the train
view keeps them (D over ``fsdp``).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxrl.ops.activations import activation
from jaxrl.ops.axes import BATCH_AXES, FSDP, TENSOR, batch_shards
from jaxrl.ops.grouped_matmul import Implementation, products
from jaxrl.ops.matrices import Matrices


class Spec(NamedTuple):
    """Choices that are compiled in; static, hashable."""

    act: str
    mesh: Mesh | None
    implementation: Implementation | None


def experts(
    x: jax.Array,
    weights: jax.Array,
    chosen: jax.Array,
    gate: Matrices,
    up: Matrices,
    down: Matrices,
    *,
    activation: str,
    mesh: Mesh | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """See the module's text.

    Args:
        x: [B, T, D].
        weights, chosen: float32 and int [B, T, k], k experts of each token.
        gate, up: [E, D, F]; down: [E, F, D]. int8 ones have no gradient.
        activation: "silu" or "gelu".
        implementation: of ``grouped_matmul``.

    Returns:
        [B, T, D] in the dtype of ``x``.
    """
    return _experts(x, weights, chosen, gate, up, down, Spec(activation, mesh, implementation))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _experts(x, weights, chosen, gate, up, down, spec):
    return _forward(x, weights, chosen, gate, up, down, spec)[0]


def _experts_fwd(x, weights, chosen, gate, up, down, spec):
    y, hidden = _forward(x, weights, chosen, gate, up, down, spec)
    return y, (x, weights, chosen, gate, up, down, hidden)


def _forward(x, weights, chosen, gate, up, down, spec: Spec):
    """y, and the products with ``gate`` and ``up`` [visits, F]."""
    layout = _layout(x, down, spec.mesh)
    multiply = products(spec.mesh, spec.implementation)

    def local(x, weights, chosen, gate, up, down):
        rows = _Rows(chosen, gate.values.shape[0])
        hidden = multiply.forward(rows.to(x), [gate, up], rows.sizes)
        z = _gated(*hidden, rows.of(weights), spec.act).astype(x.dtype)
        y = rows.back(*multiply.forward(z, [down], rows.sizes), chosen.shape)
        return layout.sum_rows(y), hidden

    inputs = (layout.rows, layout.rows, layout.rows, *layout.matrices(gate, up, down))
    outputs = (layout.summed_rows, P(layout.row_axes, layout.width))
    shard = _shard_map(local, spec.mesh, inputs, outputs)
    return shard(x, weights, chosen, gate, up, down)


def _experts_bwd(spec: Spec, residuals, dy):
    x, weights, chosen, gate, up, down, hidden = residuals
    layout = _layout(x, down, spec.mesh)
    multiply = products(spec.mesh, spec.implementation)

    def local(x, weights, chosen, gate, up, down, hidden, dy):
        rows = _Rows(chosen, gate.values.shape[0])
        gated = functools.partial(_gated, act=spec.act)
        z, vjp = jax.vjp(gated, *hidden, rows.of(weights))
        from_y = rows.to(dy)
        d_down = multiply.matrices(z.astype(x.dtype), [from_y], rows.sizes)
        *d_hidden, d_weights = vjp(multiply.rows([from_y], [down], rows.sizes).astype(z.dtype))
        d_gate, d_up = multiply.matrices(rows.to(x), d_hidden, rows.sizes)
        dx = rows.back(multiply.rows(d_hidden, [gate, up], rows.sizes), chosen.shape)
        d_weights = d_weights[rows.inverse].reshape(weights.shape)
        matrices = [layout.sum_matrices(m, axis) for m, axis in ((d_gate, 1), (d_up, 1), (*d_down, 2))]
        return layout.sum_rows(dx), layout.sum_rows(d_weights), *matrices

    given = layout.matrices(gate, up, down)
    rows = layout.rows
    inputs = (rows, rows, rows, *given, P(layout.row_axes, layout.width), rows)
    outputs = (layout.summed_rows, layout.summed_rows, *layout.gradients())
    shard = _shard_map(local, spec.mesh, inputs, outputs)
    dx, d_weights, *matrices = shard(x, weights, chosen, gate, up, down, hidden, dy)
    return dx, d_weights, None, *(Matrices(m) for m in matrices)


_experts.defvjp(_experts_fwd, _experts_bwd)


def _gated(gate, up, weights, act: str):
    """The hidden rows, in float32."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    return activation(act, gate) * up * weights[:, None]


class _Rows:
    """The visits of tokens [B, T, k] to ``experts`` experts, sorted by expert."""

    def __init__(self, chosen: jax.Array, experts: int):
        self.per_token = chosen.shape[-1]
        visited = chosen.reshape(-1)
        self.order = jnp.argsort(visited, stable=True)
        self.inverse = jnp.argsort(self.order)
        self.sizes = jnp.sum(visited[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)

    def to(self, x):
        """[B, T, D] -> a row for every visit."""
        return x.reshape(-1, x.shape[-1])[self.order // self.per_token]

    def of(self, weights):
        """[B, T, k] -> [visits]."""
        return weights.reshape(-1)[self.order]

    def back(self, rows, shape):
        """The sum of each token's rows: [B, T, D] for ``shape`` [B, T, k]."""
        return rows[self.inverse].reshape(*shape, -1).sum(-2)


class _Layout(NamedTuple):
    """Mesh axes over which arrays are split."""

    row_axes: tuple[str, ...] | None = None
    """B."""
    width: str | None = None
    """F."""
    sequence: str | None = None
    """T of what is summed over ``width``."""
    scatter: str | None = None
    """D of the gradients of the matrices."""

    @property
    def rows(self):
        return P(self.row_axes)

    @property
    def summed_rows(self):
        return P(self.row_axes, self.sequence)

    def sum_rows(self, x):
        """The sum of the devices' shares of [B, T, ...]."""
        if self.sequence:
            return lax.psum_scatter(x, self.sequence, scatter_dimension=1, tiled=True)
        return lax.psum(x, self.width) if self.width else x

    def matrices(self, gate: Matrices, up: Matrices, down: Matrices) -> list[Any]:
        spec: Any = Matrices  # of specs instead of arrays
        across = P(None, None, self.width)
        down_spec = spec(P(None, self.width), None if down.scale is None else P())
        return [*(spec(across, None if m.scale is None else across) for m in (gate, up)), down_spec]

    def gradients(self) -> list[P]:
        across = P(None, self.scatter, self.width)
        return [across, across, P(None, self.width, self.scatter)]

    def sum_matrices(self, d, axis: int):
        """A gradient summed over the tokens of all devices; ``axis`` is that of D."""
        if self.row_axes is None:
            return d
        if self.scatter is None:
            return lax.psum(d, self.row_axes)
        d = lax.psum_scatter(d, self.scatter, scatter_dimension=axis, tiled=True)
        return lax.psum(d, tuple(a for a in self.row_axes if a != self.scatter))


def _layout(x, down: Matrices, mesh: Mesh | None) -> _Layout:
    if mesh is None or mesh.size == 1:
        return _Layout()
    row_axes = BATCH_AXES if x.shape[0] % batch_shards(mesh) == 0 else None
    width = TENSOR if down.values.shape[1] % mesh.shape[TENSOR] == 0 else None
    sequence = width if x.shape[1] % mesh.shape[TENSOR] == 0 else None
    scatter = FSDP if row_axes and x.shape[-1] % mesh.shape[FSDP] == 0 else None
    return _Layout(row_axes, width, sequence, scatter)


def _shard_map(local, mesh, in_specs, out_specs):
    if mesh is None or mesh.size == 1:
        return local
    # check_vma: outputs of a kernel do not say over which axes they vary.
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
