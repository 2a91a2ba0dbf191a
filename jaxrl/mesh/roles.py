"""Which devices each role of a run has."""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh

from jaxrl.config import ConfigError
from jaxrl.mesh.axes import AXES, divisors
from jaxrl.ops.axes import DATA, TENSOR


def rollout_mesh(mesh: Mesh, tensor: int | None = None) -> Mesh:
    """The rollout view of ``mesh``: ``tensor`` devices, neighbours in its order, split each product (None: as
    many as in ``mesh``), the others hold replicas. One program takes arrays of both views.

    Raises:
        ConfigError: ``tensor`` does not divide the devices.
    """
    if tensor is None or tensor == mesh.shape[TENSOR]:
        return mesh
    if mesh.size % tensor:
        raise ConfigError(
            f"{tensor} does not divide the {mesh.size} devices; valid are "
            f"{', '.join(map(str, divisors(mesh.size)))}",
            "rollout.tensor",
        )
    sizes = {DATA: mesh.size // tensor, TENSOR: tensor}
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(shape, AXES, abstract_device=mesh.abstract_device)
    return Mesh(mesh.devices.reshape(shape), AXES)
