"""Names of the mesh axes that operations split their arrays over.

Everything that names an axis takes its name from here; ``mesh.axes`` makes the meshes.
"""

from __future__ import annotations

import math

from jax.sharding import AbstractMesh, Mesh

DATA = "data"
"""Replicas."""
FSDP = "fsdp"
"""Devices that share one copy of parameters and optimizer state, and split the rows of a batch too."""
TENSOR = "tensor"
"""Devices that split each matrix product."""

BATCH_AXES = (DATA, FSDP)
"""Axes over which rows of a batch are spread, in every view."""


def batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Number of pieces a batch of rows is cut into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)
