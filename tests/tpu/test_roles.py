"""Roles on TPU devices of their own: every split of a slice has meshes, and programs compile for them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.compile.tpu import topology_devices
from jaxrl.mesh.axes import MeshConfig
from jaxrl.mesh.roles import place


@pytest.mark.parametrize("own", [1, 3, 4])
def test_a_program_compiles_for_the_devices_of_one_role(own):
    """Also where the devices that are left fill no box."""
    devices = topology_devices("v5e:2x4")
    roles = place(MeshConfig(), own, 1, devices)
    assert (roles.policy.size, roles.rollout.size) == (8 - own, own)
    assert not set(roles.policy.devices.flat) & set(roles.rollout.devices.flat)
    for mesh in (roles.policy, roles.rollout):
        x = jax.ShapeDtypeStruct(
            (8 * mesh.size, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data"))
        )
        assert jax.jit(jnp.sum).lower(x).compile().memory_analysis().argument_size_in_bytes > 0
