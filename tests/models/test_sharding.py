"""A mesh changes where things are, not what comes out (eight virtual devices)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.config import ConfigError
from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.mesh.sharding import named
from jaxrl.models import Model, ModelConfig
from jaxrl.ops.axes import BATCH_AXES


def mesh_of(data, fsdp, tensor):
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor))


@pytest.mark.parametrize(
    ("family", "split"),
    [
        ("llama", (2, 2, 2)),
        ("llama", (1, 2, 4)),  # two kv heads, four tensor shards
        ("gemma2", (1, 8, 1)),
        ("qwen3_moe", (2, 2, 2)),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(family, split, reference):
    """On eight copies of the reference rows, whose mean loss is that of the rows."""
    c, expected = reference.load(family), reference.outputs(family)
    mesh = mesh_of(*split)
    model = dataclasses.replace(c.model, mesh=mesh)
    params = jax.device_put(c.params, named(mesh, model.specs()))
    rows = [jnp.tile(x, (8, 1)) for x in (c.tokens, c.positions, c.segments, c.goldens["target_mask"])]
    rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
    (value, (*_, router_loss)), grads = reference.training_program(model)(params, *rows)
    np.testing.assert_allclose([value, router_loss], [expected.loss, expected.router_loss], rtol=1e-5)
    for (path, a), e in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected.grads), strict=True):
        scale = float(jnp.abs(e).max())
        where = jax.tree_util.keystr(path)
        np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=0, atol=1e-5 * scale, err_msg=where)


def test_decoding_in_the_rollout_view_is_that_of_one_device(reference):
    c = reference.load("llama")
    mesh = mesh_of(2, 2, 2)
    model = dataclasses.replace(c.model, mesh=mesh)
    specs = model.specs(view="rollout")
    refresh = jax.jit(model.unstack, out_shardings=named(mesh, specs))
    rollout = refresh(jax.device_put(c.params, named(mesh, model.specs())))
    assert "fsdp" not in str(specs) and "tensor" in str(specs["layers"]["0"]["attention"]["q"])
    cache = jax.device_put(model.init_cache(12, 32), named(mesh, model.cache_specs()))
    rows = [jnp.tile(x, (4, 1)) for x in (c.tokens, jnp.where(c.segments > 0, c.positions, -1))]
    rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
    hidden, cache = jax.jit(model.extend)(rollout, *rows, cache)
    hidden = np.asarray(hidden).reshape(4, 3, 24, -1) * c.mask[..., None]
    np.testing.assert_allclose(hidden, np.tile(c.goldens["hidden_states"][-1], (4, 1, 1, 1)), atol=2e-4)
    assert cache["0"]["k"].sharding.shard_shape((12, 2, 16, 32)) == (3, 1, 16, 32)


def test_init_does_not_depend_on_the_mesh():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = Model(ModelConfig.from_scratch(sizes | {"tie_word_embeddings": True}, vocab_size=96))
    params, sharded = model.init(jax.random.key(0)), model.init(jax.random.key(0), mesh_of(1, 4, 2))
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(np.asarray(a), np.asarray(e), rtol=1e-6), sharded, params
    )
    q = sharded["blocks"]["0"]["attention"]["q"]
    assert q.sharding.shard_shape(q.shape) == (3, 8, 2, 8)


def test_parameters_lie_over_fsdp_and_tensor_where_they_divide(reference):
    specs = reference.load("qwen3_moe").model.specs(mesh_of(1, 2, 4))
    attention, mlp = specs["blocks"]["0"]["attention"], specs["blocks"]["0"]["mlp"]
    assert attention["q"] == PartitionSpec(None, "fsdp", "tensor", None)
    assert attention["k"] == PartitionSpec(None, "fsdp", None, None)  # 2 kv heads stay whole
    assert mlp["down"] == PartitionSpec(None, None, "tensor", "fsdp")
    assert specs["embed"] == specs["head"] == PartitionSpec("tensor", "fsdp")


def test_a_tensor_axis_that_does_not_divide_the_heads_is_refused(reference):
    model = reference.load("llama").model
    with pytest.raises(
        ConfigError, match=r"mesh.tensor: 8 does not divide the model's 4 query heads.*1, 2, 4"
    ):
        model.specs(mesh_of(1, 1, 8))
