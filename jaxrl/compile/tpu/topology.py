"""Meshes of TPU devices that no machine here has: what the compiler needs to make a real TPU executable."""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import platform
import sys
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxrl.config import ConfigError
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.ops.chip import CHIPS, Chip

_SIZES = {
    "v4": "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8",
    "v5e": "1x1 1x2 2x1 2x2 2x4 4x2 4x4 4x8 8x8 8x16 16x16",
    "v5p": "1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8",
    "v6e": "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16",
    "tpu7x": "1x1x1 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8",
}
TOPOLOGIES = tuple(f"{chip}:{size}" for chip, sizes in _SIZES.items() for size in sizes.split())
"""Names that the compiler accepts. Another size can abort the whole process, so no other is passed on."""

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no question to the metadata server of a TPU VM
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any valid name; the topology decides
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once
}


def compiler_missing() -> str | None:
    """Why there is no TPU compiler on this machine, or None when there is one."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"libtpu's compiler needs x86-64 Linux, this is {platform.machine()} {platform.system()}"
    if importlib.util.find_spec("libtpu") is None:
        return "libtpu is not installed; pip install 'jaxrl[tpu]' brings it"
    return None


def chip_of(topology: str) -> Chip:
    """The chip of a topology name such as ``v5e:4x4`` or ``2*v5e:4x4``."""
    return CHIPS[topology.rpartition("*")[2].split(":")[0]]


def split_topology(name: str) -> tuple[str, int]:
    """``2*v5e:16x16`` -> ("v5e:16x16", 2 slices). ConfigError, with the valid names, when it is not one."""
    count, _, slice_name = name.rpartition("*")
    if slice_name not in TOPOLOGIES:
        near = difflib.get_close_matches(slice_name, TOPOLOGIES, len(TOPOLOGIES), cutoff=0)
        close = difflib.get_close_matches(slice_name, near[:1], 1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ConfigError(f"no topology {name!r}{hint} Valid are: {', '.join(near)}")
    if "*" in name and not (count.isdecimal() and int(count) >= 1):
        raise ConfigError(
            f"no topology {name!r}: before the * stands the number of slices, as in 2*{slice_name}"
        )
    return slice_name, int(count or 1)


def num_devices(topology: str) -> int:
    """Devices of a topology, all slices together."""
    name, slices = split_topology(topology)
    sizes = [int(n) for n in name.split(":")[1].split("x")]
    return slices * math.prod(sizes) * chip_of(name).devices_per_chip


def topology_devices(topology: str, *, num_slices: int = 1) -> list[jax.Device]:
    """The devices of ``topology``, for lowering and compiling only.

    Raises:
        ConfigError: the name is unknown, or there is no compiler here.
    """
    topology, given = split_topology(topology)
    num_slices = max(num_slices, given)
    if missing := compiler_missing():
        raise ConfigError(missing)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options: dict[str, Any] = {"num_slices": num_slices} if num_slices > 1 else {}
    sizes = [int(n) for n in topology.split(":")[1].split("x")]
    if math.prod(sizes) < 4:  # less than one host's chips
        options["chips_per_host_bounds"] = (*sizes, 1, 1)[:3]
    return topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices


def topology_mesh(topology: str, config: MeshConfig | None = None, *, num_slices: int = 1) -> Mesh:
    """The mesh that ``config`` makes of the devices of ``topology``.

    Raises:
        ConfigError: as ``topology_devices``, or the mesh does not match the devices.
    """
    return make_mesh(config, topology_devices(topology, num_slices=num_slices))
