"""The experts of a Qwen3-30B-A3B layer (128 of which a token visits 8), compiled for TPU: they cost what the
visited ones need."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.compile.tpu import chip_of, program_cost, topology_mesh
from jaxrl.mesh.axes import MeshConfig
from jaxrl.ops.axes import BATCH_AXES
from jaxrl.ops.experts import experts
from jaxrl.ops.matrices import Matrices

E, PER_TOKEN, D, F = 128, 8, 2048, 768


def shapes(mesh, rows, length, *, int8=False):
    """x, weights, chosen and the matrices as the layer has them in the middle of a step: whole along D."""

    def shape(dims, dtype, *spec):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def matrices(dims, *spec):
        if not int8:
            return Matrices(shape(dims, jnp.bfloat16, *spec))
        scale = shape((E, 1, dims[2]), jnp.float32, None, None, *spec[2:])
        return Matrices(shape(dims, jnp.int8, *spec), scale)

    across = matrices((E, D, F), None, None, "tensor")
    visits = (rows, length, PER_TOKEN)
    return (
        shape((rows, length, D), jnp.bfloat16, BATCH_AXES),
        shape(visits, jnp.float32, BATCH_AXES),
        shape(visits, jnp.int32, BATCH_AXES),
        across,
        across,
        matrices((E, F, D), None, "tensor"),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "length"), [("v5e:2x4", 1024), ("v5p:2x2x2", 256), ("v6e:2x4", 256)])
def test_gradients_cost_what_the_visited_experts_need(topology, length):
    """8 rows of tokens on a device, so 512 or 128 visits an expert. Products: three forward and six backward,
    and a piece of 128 or 256 rows in vain for an expert. HBM: every matrix and its gradient once a product,
    and the rows a few times, sorted and unsorted."""
    mesh = topology_mesh(topology, MeshConfig(data=1, fsdp=4, tensor=2))
    arrays = shapes(mesh, 32, length)

    def value(x, weights, gate, up, down, chosen):
        y = experts(x, weights, chosen, gate, up, down, activation="silu", mesh=mesh)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    x, weights, chosen, *matrices = arrays
    compiled = jax.jit(jax.grad(value, (0, 1, 2, 3, 4))).lower(x, weights, *matrices, chosen).compile()
    cost = program_cost(compiled, chip_of(topology))
    visits = math.prod(chosen.shape) // 4
    need = 9 * 2 * visits * D * F // 2
    piece = 256 if topology.startswith("v6e") else 128
    assert need <= cost.flops <= 1.02 * (1 + piece * E / visits) * need
    rows, weights = 2 * visits * D, 2 * E * D * F // 2
    assert cost.hbm_bytes < 9 * weights + 20 * rows


@pytest.mark.slow
@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16", "int8"])
def test_a_decode_step_reads_the_matrices_once_as_they_are(int8):
    """Also where a device's slice of F is no multiple of 128."""
    mesh = topology_mesh("v6e:2x4", MeshConfig(data=2, tensor=4))
    run = jax.jit(lambda *a: experts(*a, activation="silu", mesh=mesh))
    cost = program_cost(run.lower(*shapes(mesh, 256, 1, int8=int8)).compile(), chip_of("v6e:2x4"))
    matrices = 3 * E * D * F // 4 * (1 if int8 else 2)
    assert cost.hbm_bytes < 1.5 * matrices  # what is fetched to VMEM ahead of the kernel counts twice
    assert cost.temp_bytes < 0.1 * matrices
