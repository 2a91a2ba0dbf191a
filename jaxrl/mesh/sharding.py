"""The mesh, and how logical axes of arrays lie on it.

The *train view* is a mesh with axes (data, fsdp, tensor) that spreads parameters over fsdp and tensor. The
*rollout view* is the same devices, in the same order, seen as (data, tensor) with a tensor size of its own:
weights lie over tensor only, so the decode loop never gathers a parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxrl.config import ConfigError, setting

View = Literal["train", "rollout"]
AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
"""Mesh axes over which rows of a batch are spread, in both views."""

_TENSOR_PARALLEL = {name: "tensor" for name in ("vocab", "heads", "kv_heads", "mlp", "experts")}
RULES: dict[View, dict[str, str]] = {
    "train": {**_TENSOR_PARALLEL, "embed": "fsdp", "sequence": "tensor"},
    "rollout": {**_TENSOR_PARALLEL, "sequence": "tensor"},
}
"""Logical axis -> mesh axis; an axis that is not named is replicated.

Tokens of a row ("sequence") lie over tensor between the matrix products of a layer: what norms and residuals
read and keep is split, and the products' sums arrive as reduce-scatters (Korthikanti et al.,
arXiv:2205.05198)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each axis of the mesh has; the product must be the number of devices."""

    data: int = setting(-1, "data-parallel replicas (devices); -1: whatever the other axes leave")
    fsdp: int = setting(1, "devices that share one copy of parameters and optimizer state")
    tensor: int = setting(1, "devices that split each matrix product (heads, mlp, vocabulary, experts)")

    def problems(self) -> Iterable[tuple[str, str]]:
        sizes = dataclasses.asdict(self)
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                yield axis, f"{size}: needs a positive number of devices, or -1 for one axis"
        if list(sizes.values()).count(-1) > 1:
            yield "data", f"-1 is given for several axes ({sizes}): at most one can be derived"

    def resolve(self, num_devices: int) -> dict[str, int]:
        """Axis sizes for ``num_devices``. ConfigError with the numbers and a valid choice when they do not
        match."""
        sizes = dataclasses.asdict(self)
        known = math.prod(s for s in sizes.values() if s != -1)
        free = [axis for axis, s in sizes.items() if s == -1]
        if free and num_devices % known == 0:
            sizes[free[0]] = num_devices // known
        if math.prod(sizes.values()) != num_devices:
            given = " x ".join(f"{axis} {size}" for axis, size in dataclasses.asdict(self).items())
            raise ConfigError(
                f"{given} does not match {num_devices} devices, which the product of the axes must be. "
                f"Valid: mesh.data={num_devices} mesh.fsdp=1 mesh.tensor=1, or mesh.data=-1 with "
                f"fsdp * tensor one of {', '.join(map(str, divisors(num_devices)))}",
                "mesh",
            )
        return sizes


def divisors(n: int) -> list[int]:
    """All positive divisors, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def make_mesh(config: MeshConfig | None = None, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over ``devices`` (default: all of the run). TPU devices are laid out along the
    interconnect."""
    devices = jax.devices() if devices is None else list(devices)
    sizes = (config or MeshConfig()).resolve(len(devices))
    shape = tuple(sizes[axis] for axis in AXES)
    # JAX's layout of a v4 wants one device a chip; ahead of time there are two.
    two_a_chip = devices[0].device_kind == "TPU v4" and any(d.core_on_chip for d in devices)
    if devices[0].platform == "cpu" or two_a_chip:
        return Mesh(np.asarray(devices).reshape(shape), AXES)
    from jax.experimental import mesh_utils

    slices = len({getattr(d, "slice_index", 0) for d in devices})
    if slices > 1:  # the slow network between slices carries the data axis alone
        if sizes["data"] % slices:
            raise ConfigError(
                f"{sizes['data']} replicas over {slices} slices: whole replicas lie in a slice, so the axis "
                f"needs a multiple of {slices}",
                "mesh.data",
            )
        inner = (shape[0] // slices, *shape[1:])
        outer = (slices, 1, 1)
        return Mesh(
            mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True), AXES
        )
    return Mesh(mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True), AXES)


def rollout_mesh(mesh: Mesh, tensor: int | None = None) -> Mesh:
    """The rollout view of ``mesh``: ``tensor`` devices, neighbours in its order, split each product (None: as
    many as in ``mesh``), the others hold replicas. One program takes arrays of both views.

    Raises:
        ConfigError: ``tensor`` does not divide the devices.
    """
    if tensor is None or tensor == mesh.shape["tensor"]:
        return mesh
    if mesh.size % tensor:
        raise ConfigError(
            f"{tensor} does not divide the {mesh.size} devices; valid are "
            f"{', '.join(map(str, divisors(mesh.size)))}",
            "rollout.tensor",
        )
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh((mesh.size // tensor, 1, tensor), AXES, abstract_device=mesh.abstract_device)
    return Mesh(mesh.devices.reshape(-1, 1, tensor), AXES)


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


def batch_spec(num_dims: int, batch_dim: int = 0) -> PartitionSpec:
    """Rows over data and fsdp, everything else whole."""
    return PartitionSpec(*(BATCH_AXES if d == batch_dim else None for d in range(num_dims)))


def batch_shards(mesh: Mesh) -> int:
    """Number of pieces a batch of rows is cut into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def put(tree, mesh: Mesh, spec: PartitionSpec | None = None):
    """The one explicit host-to-device copy: numpy arrays, equal on every process, become global arrays."""
    sharding = NamedSharding(mesh, spec or PartitionSpec())

    def one(x):
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(one, tree)


def platform(mesh: Mesh | AbstractMesh | None) -> str:
    """ "cpu", "gpu" or "tpu": what the program is compiled for, which need not be a device of this machine.
    Without a mesh, JAX's default."""
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
        return jax.default_backend() if device is None else device.platform
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
