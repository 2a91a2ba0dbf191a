"""What the Pallas kernels of this folder have to know of the chip they are compiled for."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl.mesh.sharding import platform

_WIDE = ("TPU v6 lite", "TPU v6e", "TPU7x")
"""Chips with matrix units of 256 x 256."""
_VMEM_MIB = {"TPU v4": 14, "TPU v5 lite": 100, "TPU v5e": 100, "TPU v6 lite": 100, "TPU v6e": 100}
_VMEM_MIB_ELSEWHERE = 50
"""Of 128 MiB (v5e, v6e), 64 (v5p, TPU7x) and 16 (v4), what a kernel may use."""


class Chip(NamedTuple):
    """A chip, or the absence of one."""

    vmem_bytes: int
    interpret: bool
    """Without a TPU the kernels are interpreted."""
    cores: int = 1
    """TensorCores that share a kernel's grid."""
    mxu: int = 128
    """Rows and columns of a matrix unit."""


def chip_of(mesh: Mesh | None) -> Chip:
    """Of the mesh's devices; None: of the default ones."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    mib = _VMEM_MIB.get(device.device_kind, _VMEM_MIB_ELSEWHERE)
    on_tpu = platform(mesh) == "tpu"
    return Chip(
        mib * 2**20,
        interpret=not on_tpu,
        cores=device.num_cores if on_tpu else 1,
        mxu=256 if device.device_kind in _WIDE else 128,
    )
