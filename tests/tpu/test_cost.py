"""Costs of compiled TPU programs against what one works out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.compile.tpu import CHIPS, TOPOLOGIES, chip_of, program_cost, topology_mesh
from jaxrl.config import ConfigError
from jaxrl.mesh.axes import MeshConfig


def compiled(function, mesh, *arrays, **options):
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in arrays
    ]
    return jax.jit(function, **options).lower(*shapes).compile()


def test_flops_of_a_scan_count_every_iteration_and_an_unknown_loop_what_is_said():
    mesh = topology_mesh("v5e:2x2", MeshConfig())
    weights = ((6, 256, 256), jnp.bfloat16, P())
    x = ((128, 256), jnp.bfloat16, P())

    def scanned(w, x):
        return jax.lax.scan(lambda x, w: (jax.nn.silu(x @ w), None), x, w)[0]

    def repeated(w, x, n):
        return jax.lax.fori_loop(0, n, lambda i, x: jax.nn.silu(x @ w[0]), x)

    once = 2 * 128 * 256 * 256
    cost = program_cost(compiled(scanned, mesh, weights, x), CHIPS["v5e"])
    assert cost.flops == 6 * once and not cost.unknown_loops
    assert 0 < cost.mxu_seconds < 1e-3
    loop = compiled(repeated, mesh, weights, x, ((), jnp.int32, P()))
    assert program_cost(loop, CHIPS["v5e"]).flops == once
    cost = program_cost(loop, CHIPS["v5e"], trips=5)
    assert cost.flops == 5 * once and len(cost.unknown_loops) == 1


def test_wire_bytes_of_a_gather_and_a_reduction():
    mesh = topology_mesh("v5e:2x4", MeshConfig(fsdp=2, tensor=4))

    def gather(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P())) + 1

    cost = program_cost(compiled(gather, mesh, ((1024, 512), jnp.float32, P("tensor"))), CHIPS["v5e"])
    assert [c.kind for c in cost.collectives] == ["all-gather"]
    assert cost.wire_bytes == 1024 * 512 * 4 * 3 / 4

    def product(x, w):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P()))

    arrays = ((512, 1024), jnp.float32, P(None, "tensor")), ((1024, 256), jnp.float32, P("tensor"))
    cost = program_cost(compiled(product, mesh, *arrays), CHIPS["v5e"])
    assert [(c.kind, c.group_size) for c in cost.collectives] == [("all-reduce", 4)]
    assert cost.wire_bytes == 512 * 256 * 4 * 2 * 3 / 4


def test_what_goes_to_another_slice_is_counted_apart():
    mesh = topology_mesh("2*v5e:2x2", MeshConfig(data=2, fsdp=2, tensor=2))

    def total(x):
        return jax.lax.with_sharding_constraint(x.sum(0), NamedSharding(mesh, P()))

    x = ((1024, 1024), jnp.float32, P(("data", "fsdp")))
    cost = program_cost(compiled(total, mesh, x), CHIPS["v5e"])
    assert cost.dcn_bytes == 1024 * 4 and cost.wire_bytes == 1024 * 4 * 2 / 2


def test_hbm_bytes_and_donation():
    mesh = topology_mesh("v5e:2x2", MeshConfig())
    big = ((64, 2**20), jnp.float32, P())

    def add(x):
        return x + 1

    cost = program_cost(compiled(add, mesh, big), CHIPS["v5e"])
    assert cost.hbm_bytes == 2 * 64 * 2**22
    assert cost.peak_bytes >= 2 * 64 * 2**22 and cost.alias_bytes == 0
    cost = program_cost(compiled(add, mesh, big, donate_argnums=0), CHIPS["v5e"])
    assert cost.alias_bytes == 64 * 2**22 and cost.peak_bytes < 1.1 * 64 * 2**22

    def update(x, row):  # in place: only the row moves
        return jax.lax.dynamic_update_slice(x, row, (3, 0))

    row = ((1, 2**20), jnp.float32, P())
    cost = program_cost(compiled(update, mesh, big, row, donate_argnums=0), CHIPS["v5e"])
    assert cost.hbm_bytes <= 3 * 2**22


@pytest.mark.parametrize(
    ("given", "near"), [("v5e-8", "v5e:"), ("v7x:2x2x1", "tpu7x:2x2x1"), ("v5e:4x4x4", "v5p:4x4x4")]
)
def test_an_unknown_topology_lists_the_valid_ones(given, near):
    with pytest.raises(ConfigError, match=r"Valid are: .*v6e:4x4") as error:
        topology_mesh(given)
    assert near in str(error.value)


def test_every_chip_has_topologies_and_a_mesh_of_the_right_size():
    assert {chip_of(name).name for name in TOPOLOGIES} == set(CHIPS)
    assert topology_mesh("v5e:1x1").size == 1
    assert topology_mesh("v5p:2x2x1", MeshConfig(data=1, fsdp=2, tensor=2)).shape["fsdp"] == 2
    with pytest.raises(ConfigError, match="16 devices"):
        topology_mesh("v5e:4x4", MeshConfig(data=3))


def test_copies_to_host_memory_are_counted_and_slices_at_their_size():
    mesh = topology_mesh("v5e:2x2", MeshConfig())
    host = NamedSharding(mesh, P(), memory_kind="pinned_host")
    device = NamedSharding(mesh, P(), memory_kind="device")
    kept = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=host)

    def decay(kept):
        return jax.device_put(jax.device_put(kept, device) * 0.5, host)

    cost = program_cost(jax.jit(decay, donate_argnums=0).lower(kept).compile(), CHIPS["v5e"])
    assert cost.host_bytes == 2 * 4 * 1024**2

    def total(kept):
        def body(carry, i):
            row = jax.lax.dynamic_slice_in_dim(kept, i * 128, 128)
            return carry + jax.device_put(row, device).sum(), None

        return jax.lax.scan(body, 0.0, jnp.arange(4))[0]

    cost = program_cost(jax.jit(total).lower(kept).compile(), CHIPS["v5e"])
    assert cost.host_bytes == 4 * 128 * 4 * 1024
