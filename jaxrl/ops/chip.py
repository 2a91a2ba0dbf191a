"""TPU chips: published figures, and what the Pallas kernels have to know of the one they are compiled for.

Sources, per device as JAX counts them:

    FLOP/s, HBM GB/s     Google Cloud, "TPU architecture" pages of each version
                         (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x)
    ICI GB/s             the same pages' totals over a chip's links; per axis as "How to Scale Your Model"
                         (jax-ml.github.io/scaling-book, chapter 2) has them
    DCN GB/s             the same chapter's egress of a chip; TPU7x: its Google Cloud page
    host GB/s            the same chapter: about 15 a chip, 32 for v6e, 16 for v4; TPU7x: none is
                         published, so as v6e
    HBM bytes            what libtpu's compiler lets one program use
    clock                what turns the compiler's cycle estimates into seconds
    VMEM                 128 MiB (v5e, v6e), 64 (v5p, TPU7x), 16 (v4), less what the compiler needs
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

MIB, GIB = 2**20, 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device. A v4 or TPU7x chip is two devices for the compiler's topologies; the figures are halved."""

    name: str
    device_kinds: tuple[str, ...]
    """JAX's names of it."""
    flops_per_second: float
    """Dense bfloat16 matrix products."""
    hbm_bytes: int
    hbm_bytes_per_second: float
    ici_bytes_per_second: float
    """Bandwidth of one mesh axis, both directions together: what a ring over one axis moves."""
    dcn_bytes_per_second: float
    """To other slices."""
    host_bytes_per_second: float
    """To or from the memory of its host, one way at a time."""
    clock_hz: float
    vmem_bytes: int
    """That a kernel may use."""
    matrix_unit: int = 128
    """Rows and columns of a matrix unit."""
    devices_per_chip: int = 1


_CHIPS = (
    Chip(
        name="v4",
        device_kinds=("TPU v4",),
        flops_per_second=137.5e12,
        hbm_bytes=int(15.48 * GIB),
        hbm_bytes_per_second=614e9,
        ici_bytes_per_second=45e9,
        dcn_bytes_per_second=3.125e9,
        host_bytes_per_second=8e9,
        clock_hz=1.05e9,
        vmem_bytes=14 * MIB,
        devices_per_chip=2,
    ),
    Chip(
        name="v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        flops_per_second=197e12,
        hbm_bytes=int(15.75 * GIB),
        hbm_bytes_per_second=819e9,
        ici_bytes_per_second=90e9,
        dcn_bytes_per_second=3.125e9,
        host_bytes_per_second=15e9,
        clock_hz=1.5e9,
        vmem_bytes=100 * MIB,
    ),
    Chip(
        name="v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        flops_per_second=459e12,
        hbm_bytes=int(95.73 * GIB),
        hbm_bytes_per_second=2765e9,
        ici_bytes_per_second=180e9,
        dcn_bytes_per_second=6.25e9,
        host_bytes_per_second=15e9,
        clock_hz=1.75e9,
        vmem_bytes=50 * MIB,
    ),
    Chip(
        name="v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        flops_per_second=918e12,
        hbm_bytes=int(31.24 * GIB),
        hbm_bytes_per_second=1640e9,
        ici_bytes_per_second=180e9,
        dcn_bytes_per_second=12.5e9,
        host_bytes_per_second=32e9,
        clock_hz=1.75e9,
        vmem_bytes=100 * MIB,
        matrix_unit=256,
    ),
    Chip(
        name="tpu7x",
        device_kinds=("TPU7x",),
        flops_per_second=1153.5e12,
        hbm_bytes=int(94.74 * GIB),
        hbm_bytes_per_second=3690e9,
        ici_bytes_per_second=90e9,
        dcn_bytes_per_second=6.25e9,
        host_bytes_per_second=16e9,
        clock_hz=1.9e9,
        vmem_bytes=50 * MIB,
        matrix_unit=256,
        devices_per_chip=2,
    ),
)
CHIPS = {chip.name: chip for chip in _CHIPS}
"""By the name that topologies begin with."""
_BY_KIND = {kind: chip for chip in _CHIPS for kind in chip.device_kinds}


class Target(NamedTuple):
    """Target that a kernel is compiled for: a TPU chip, or the absence of one."""

    vmem_bytes: int
    interpret: bool
    """Without a TPU the kernels are interpreted."""
    cores: int = 1
    """TensorCores that share a kernel's grid."""
    matrix_unit: int = 128


def target_of(mesh: Mesh | None) -> Target:
    """Return the target of the mesh's devices; None: of the default ones. An unknown one counts as a v5p."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    chip = _BY_KIND.get(device.device_kind, CHIPS["v5p"])
    on_tpu = platform(mesh) == "tpu"
    cores = device.num_cores if on_tpu else 1
    return Target(chip.vmem_bytes, not on_tpu, cores, chip.matrix_unit)


def platform(mesh: Mesh | AbstractMesh | None) -> str:
    """ "cpu", "gpu" or "tpu": what the program is compiled for, which need not be a device of this machine.
    Without a mesh, JAX's default."""
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
        return jax.default_backend() if device is None else device.platform
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
