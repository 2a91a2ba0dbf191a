"""Gradients that add up over all tokens: in float32, whatever parameters and activations are kept in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.models import Model, ModelConfig
from jaxrl.models.layers import add_bias, embed
from jaxrl.ops.axes import BATCH_AXES

MESHES = {"no mesh": None, "data": (8, 1, 1), "fsdp and tensor": (1, 4, 2)}
ROUNDING = {"float32": 1e-6, "bfloat16": 2.0**-8}
"""Of the sum itself, in the type of the parameter."""


def mesh_of(name):
    split = MESHES[name]
    return split and make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), split, strict=True))))


def placed(x, mesh, *spec):
    return x if mesh is None else jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


@pytest.mark.parametrize("param_dtype", ROUNDING)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_bias_adds_up_its_gradient_in_float32(mesh, param_dtype):
    """65,536 tokens whose cotangents share a sign: added up in bfloat16, half of the sum is lost."""
    mesh = mesh_of(mesh)
    cotangents = np.random.default_rng(0).uniform(0.5, 1.5, (64, 1024, 2, 4))
    cotangents = jnp.asarray(cotangents, jnp.bfloat16)
    exact = np.asarray(cotangents, np.float64).sum((0, 1))
    y = placed(jnp.ones(cotangents.shape, jnp.bfloat16), mesh, BATCH_AXES, None, "tensor")
    bias = placed(jnp.full((2, 4), 0.3, param_dtype), mesh, "tensor")
    out, pull = jax.vjp(jax.jit(add_bias), y, bias)
    # As the sampler has it, whose biases are bfloat16: rounded, then added.
    want = jnp.bfloat16(np.float32(jnp.bfloat16(0.3)) + 1)
    assert out.dtype == jnp.bfloat16 and (out == want).all()
    gradient = pull(placed(cotangents, mesh, BATCH_AXES, None, "tensor"))[1]
    assert gradient.dtype == param_dtype
    np.testing.assert_allclose(np.asarray(gradient, np.float64), exact, rtol=ROUNDING[param_dtype])


@pytest.mark.parametrize("param_dtype", ROUNDING)
@pytest.mark.parametrize("compute_dtype", ROUNDING)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("rows", [8, 3])  # three rows divide no mesh
def test_an_embedding_adds_up_its_gradient_in_float32(mesh, rows, compute_dtype, param_dtype):
    """A token seen 4,096 times and more, with cotangents of 1: in bfloat16 a sum of ones stops at 256."""
    mesh = mesh_of(mesh)
    table = placed(jnp.ones((16, 8), param_dtype), mesh, "tensor", "fsdp")
    tokens = placed(jnp.full((rows, 2048), 5), mesh, BATCH_AXES if rows == 8 else None)
    lookup = functools.partial(embed, dtype=compute_dtype, mesh=mesh)
    gradient = jax.jit(jax.grad(lambda table: lookup(table, tokens).astype(jnp.float32).sum()))(table)
    assert gradient.dtype == param_dtype
    np.testing.assert_array_equal(np.asarray(gradient[5], np.float64), rows * 2048)
    assert not np.asarray(gradient[:5]).any() and not np.asarray(gradient[6:]).any()


def test_biases_and_scales_of_a_model_get_the_gradient_of_float32(reference):
    """Of 4,096 tokens, all of which pull in one direction."""
    sizes = {"model_type": "qwen2", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = ModelConfig.from_scratch(sizes | {"num_attention_heads": 2}, vocab_size=32)
    params = Model(config).init(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (128, 32), 0, 32)
    positions = jnp.broadcast_to(jnp.arange(32), tokens.shape)

    def gradient(dtype):
        def loss(params):
            hidden, _ = Model(config, compute_dtype=dtype).hidden_states(
                params, tokens, positions, jnp.ones_like(tokens)
            )
            return hidden.astype(jnp.float32)[..., 0].sum()

        return jax.jit(jax.grad(loss))(params)

    checked = 0
    for (path, a), e in zip(
        jax.tree.leaves_with_path(gradient("bfloat16")), jax.tree.leaves(gradient("float32")), strict=True
    ):
        name = jax.tree_util.keystr(path)
        if ("bias" in name and "k_bias" not in name) or "norm" in name:  # a key's bias has next to none
            checked += 1
            assert np.linalg.norm(a - e) < 0.02 * np.linalg.norm(e), name
    assert checked == 5
