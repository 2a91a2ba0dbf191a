"""The devices of each role of a run, and the mesh that it sees them as.

Roles share all devices, in phases, or the sampler has devices of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxrl.config import ConfigError
from jaxrl.mesh.axes import AXES, MeshConfig, divisors, make_mesh
from jaxrl.ops.axes import DATA, TENSOR


class Roles(NamedTuple):
    """The mesh of each role."""

    policy: Mesh
    """Mesh of the model that is trained: the train view."""
    rollout: Mesh
    """Mesh of its copy that samples: the rollout view."""

    @property
    def reference(self) -> Mesh:
        """Mesh of the frozen reference, whose log-probs the policy's learner computes."""
        return self.policy

    @property
    def reward_models(self) -> Mesh:
        """Reward models lie beside the policy."""
        return self.policy

    @property
    def shared(self) -> bool:
        """True where policy and rollout have the same devices."""
        return self.rollout.size == self.policy.size and (
            isinstance(self.policy, AbstractMesh)
            or set(self.rollout.devices.flat) == set(self.policy.devices.flat)
        )

    @property
    def num_devices(self) -> int:
        """Devices of all roles together."""
        return self.policy.size + (0 if self.shared else self.rollout.size)


def on(mesh: Mesh, rollout_tensor: int | None = None) -> Roles:
    """Every role on the devices of ``mesh``. ConfigError as ``rollout_mesh``."""
    return Roles(mesh, rollout_mesh(mesh, rollout_tensor))


def place(
    config: MeshConfig,
    rollout_devices: int = 0,
    rollout_tensor: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Roles:
    """The roles over ``devices`` (default: all of the run).

    Args:
        config: sizes of the mesh that trains.
        rollout_devices: that only sample, the last ones; the others train. 0: all do both.
        rollout_tensor: devices that split each product of the sampler; None: as many as in training.

    Raises:
        ConfigError: the numbers do not go together.
    """
    devices = jax.devices() if devices is None else list(devices)
    if not rollout_devices:
        return on(make_mesh(config, devices), rollout_tensor)
    training, sampling = _split(devices, rollout_devices)
    mesh = make_mesh(config, training)
    sizes = rollout_sizes(rollout_devices, mesh.shape[TENSOR] if rollout_tensor is None else rollout_tensor)
    return Roles(mesh, make_mesh(MeshConfig(**sizes), sampling))


def _split(devices: list[jax.Device], number: int) -> tuple[list[jax.Device], list[jax.Device]]:
    """(those that train, the last ``number``, which sample)."""
    if jax.process_count() > 1:
        raise ConfigError(
            f"{number} devices for the sampler alone, but JAX moves nothing between disjoint devices of "
            "several processes; must be 0",
            "rollout.devices",
        )
    if number >= len(devices):
        raise ConfigError(
            f"{number} of {len(devices)} devices for the sampler alone: must be at most {len(devices) - 1}, "
            "as others have to train, or 0 for devices that do both",
            "rollout.devices",
        )
    return devices[:-number], devices[-number:]


def rollout_mesh(mesh: Mesh, tensor: int | None = None) -> Mesh:
    """The rollout view of ``mesh``: ``tensor`` devices, neighbours in its order, split each product (None: as
    many as in ``mesh``), the others hold replicas. One program takes arrays of both views.

    Raises:
        ConfigError: ``tensor`` does not divide the devices.
    """
    if tensor is None or tensor == mesh.shape[TENSOR]:
        return mesh
    shape = tuple(rollout_sizes(mesh.size, tensor).values())
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(shape, AXES, abstract_device=mesh.abstract_device)
    return Mesh(mesh.devices.reshape(shape), AXES)


def rollout_sizes(devices: int, tensor: int) -> dict[str, int]:
    """Sizes of the axes of a rollout view. ConfigError when ``tensor`` does not divide the devices."""
    if devices % tensor:
        raise ConfigError(
            f"{tensor} does not divide the {devices} devices; valid are "
            f"{', '.join(map(str, divisors(devices)))}",
            "rollout.tensor",
        )
    sizes = {DATA: devices // tensor, TENSOR: tensor}
    return {axis: sizes.get(axis, 1) for axis in AXES}
