"""Splash attention through the TPU compiler."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.compile.tpu import topology_mesh
from jaxrl.mesh.axes import MeshConfig
from jaxrl.ops.attention import attention
from jaxrl.ops.axes import BATCH_AXES

ROWS, LENGTH = 4, 1500  # no multiple of a block


def compiled_gradient(mesh, heads, kv_heads, head_dim, **options):
    """The default implementation, forward and backward, of packed rows in bfloat16."""

    def array(spec, *shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def loss(q, k, v, positions, ids):
        out = attention(
            q,
            k,
            v,
            q_positions=positions,
            kv_positions=positions,
            q_segments=ids,
            kv_segments=ids,
            scale=head_dim**-0.5,
            mesh=mesh,
            **options,
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    rows, split = P(BATCH_AXES), P(BATCH_AXES, None, "tensor")
    keys = split if kv_heads % mesh.shape["tensor"] == 0 else rows
    shapes = (
        array(split, ROWS, LENGTH, heads, head_dim),
        *(array(keys, ROWS, LENGTH, kv_heads, head_dim) for _ in range(2)),
        *(array(rows, ROWS, LENGTH, dtype=jnp.int32) for _ in range(2)),
    )
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "options"),
    [
        (8, 2, 64, {}),  # Llama 3.2 1B; heads of 128 are those of test_update
        (8, 4, 256, {"window": 1024, "soft_cap": 50.0}),  # Gemma 2
        (4, 1, 256, {"window": 512}),  # Gemma 3 1B: the kv head is on both devices
    ],
)
def test_compiles_and_holds_no_scores(topology, heads, kv_heads, head_dim, options):
    mesh = topology_mesh(topology, MeshConfig(fsdp=2, tensor=2))
    compiled = compiled_gradient(mesh, heads, kv_heads, head_dim, **options)
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3  # forward, dq, and dk with dv
    rows, local = ROWS // 2, heads // 2
    assert compiled.memory_analysis().temp_size_in_bytes < rows * local * LENGTH * LENGTH * 2
    assert "all-" not in text or kv_heads == 1
