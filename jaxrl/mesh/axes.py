"""The mesh: its axes, their sizes, and how they lie on the devices.

Another axis is another field of ``MeshConfig``; what lies over it is said in ``mesh.sharding.RULES``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from jaxrl.config import ConfigError, setting
from jaxrl.ops.axes import DATA


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices that each axis of the mesh has; the product must be the number of devices."""

    data: int = setting(-1, "data-parallel replicas (devices); -1: whatever the other axes leave")
    fsdp: int = setting(1, "devices that share one copy of parameters and optimizer state")
    tensor: int = setting(1, "devices that split each matrix product (heads, mlp, vocabulary, experts)")

    def problems(self) -> Iterable[tuple[str, str]]:
        sizes = dataclasses.asdict(self)
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                yield axis, f"{size}: needs a positive number of devices, or -1 for one axis"
        if list(sizes.values()).count(-1) > 1:
            yield DATA, f"-1 is given for several axes ({sizes}): at most one can be derived"

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
            others = [axis for axis in sizes if axis != DATA]
            ones = " ".join(f"mesh.{axis}=1" for axis in others)
            raise ConfigError(
                f"{given} does not match {num_devices} devices, which the product of the axes must be. "
                f"Valid: mesh.data={num_devices} {ones}, or mesh.data=-1 with "
                f"{' * '.join(others)} one of {', '.join(map(str, divisors(num_devices)))}",
                "mesh",
            )
        return sizes


AXES = tuple(field.name for field in dataclasses.fields(MeshConfig))
"""All axes, the slowest first."""


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
    if devices[0].platform == "cpu" or two_a_chip or not _fill_a_box(devices):
        return Mesh(np.asarray(devices).reshape(shape), AXES)
    slices = len({getattr(d, "slice_index", 0) for d in devices})
    if slices > 1:  # the slow network between slices carries the data axis alone
        if sizes[DATA] % slices:
            raise ConfigError(
                f"{sizes[DATA]} replicas over {slices} slices: whole replicas lie in a slice, so the axis "
                f"needs a multiple of {slices}",
                f"mesh.{DATA}",
            )
        outer = tuple(slices if axis == DATA else 1 for axis in AXES)
        inner = tuple(n // parts for n, parts in zip(shape, outer, strict=True))
        return Mesh(
            mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True), AXES
        )
    return Mesh(mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True), AXES)


def _fill_a_box(devices: Sequence[jax.Device]) -> bool:
    """True where TPU chips fill a box, as JAX's layout wants them; those of a role may not."""
    places = {tuple(getattr(d, "coords", ())) for d in devices}  # the cores of a chip share one
    if () in places:
        return True
    return bool(np.prod(np.ptp(np.array([*places]), axis=0) + 1) == len(places))
