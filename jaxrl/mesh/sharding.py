"""Rules for how logical axes of arrays lie on the mesh.

The *train view* is a mesh with axes (data, fsdp, tensor) that spreads parameters over fsdp and tensor. The
*rollout view* is the same devices, in the same order, seen as (data, tensor) with a tensor size of its own:
weights lie over tensor only, so the decode loop never gathers a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.ops.axes import FSDP, TENSOR

View = Literal["train", "rollout"]

_TENSOR_PARALLEL = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "sequence"), TENSOR)
RULES: dict[View, dict[str, str]] = {
    "train": {**_TENSOR_PARALLEL, "embed": FSDP},
    "rollout": _TENSOR_PARALLEL,
}
"""Logical axis -> mesh axis; an axis that is not named is replicated.

Tokens of a row ("sequence") lie over tensor between the matrix products of a layer: what norms and residuals
read and keep is split, and the products' sums arrive as reduce-scatters (Korthikanti et al.,
arXiv:2205.05198)."""


def spec_for(
    logical_axes: Sequence[str | None], shape: Sequence[int], mesh: Mesh | None, view: View = "train"
) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions carry ``logical_axes``. A dimension that its mesh axis does
    not divide stays replicated, and a mesh axis is used once (the first dimension that asks for it gets
    it)."""
    if mesh is None:
        return PartitionSpec()
    entries: list[str | None] = []
    for name, size in zip(logical_axes, shape, strict=True):
        axis = RULES[view].get(name) if name else None
        fits = axis is not None and axis not in entries and size % mesh.shape[axis] == 0
        entries.append(axis if fits else None)
    return PartitionSpec(*entries)


def named(mesh: Mesh, specs):
    """A tree of PartitionSpec as a tree of NamedSharding."""
    return jax.tree.map(
        lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec)
    )


def shapes_with(shardings: Any, shapes: Any) -> Any:
    """ShapeDtypeStructs with shardings on them, from two trees of one structure."""
    return jax.tree.map(lambda s, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shardings, shapes)


def put(tree, mesh: Mesh, spec: PartitionSpec | None = None):
    """The one explicit host-to-device copy: numpy arrays, equal on every process, become global arrays."""
    sharding = NamedSharding(mesh, spec or PartitionSpec())

    def one(x):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(one, tree)
