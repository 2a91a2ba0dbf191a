"""Compiling for TPU without a TPU: libtpu's compiler runs on any x86-64 Linux machine.

mesh = topology_mesh("v5e:4x4", MeshConfig(fsdp=4, tensor=4))
compiled = jax.jit(f).lower(*shapes_with_shardings_on_the_mesh).compile()
cost = program_cost(compiled, CHIPS["v5e"])
"""

from jaxrl.compile.tpu.cost import Collective, Cost, program_cost, program_costs
from jaxrl.compile.tpu.topology import (
    TOPOLOGIES,
    chip_of,
    compiler_missing,
    num_devices,
    split_topology,
    topology_devices,
    topology_mesh,
)
from jaxrl.ops.chip import CHIPS, Chip

__all__ = [
    "CHIPS",
    "TOPOLOGIES",
    "Chip",
    "Collective",
    "Cost",
    "chip_of",
    "compiler_missing",
    "num_devices",
    "program_cost",
    "program_costs",
    "split_topology",
    "topology_devices",
    "topology_mesh",
]
