"""From the training parameters to the sampler's: values, types, places and memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.mesh.sharding import named
from jaxrl.models import Model, ModelConfig
from jaxrl.rollout.weights import make_refresh

SCRATCH = dict(
    model_type="qwen2",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.fixture(scope="module")
def setting():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    model = Model(ModelConfig.from_scratch(SCRATCH, vocab_size=64), mesh=mesh)
    return model, mesh, model.init(jax.random.key(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_types_and_places(setting, dtype):
    model, mesh, params = setting
    got = make_refresh(model, mesh, dtype)(params)
    expected = model.unstack(params)
    places = named(mesh, model.specs(view="rollout"))

    def check(x, e, place):
        assert x.dtype == dtype and x.sharding.is_equivalent_to(place, x.ndim)
        np.testing.assert_array_equal(x, e.astype(dtype))

    jax.tree.map(check, got, expected, places)


def test_it_takes_the_place_of_the_old_weights_and_shares_nothing_with_the_parameters(setting):
    """The parameters are donated to the next update while the sampler still runs."""
    model, mesh, params = setting
    refresh = make_refresh(model, mesh, "float32")
    old = refresh(params)
    moved = jax.tree.map(lambda x: x + 1, params)
    new = refresh(moved, old)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    jax.tree.map(lambda x: x.delete(), moved)
    jax.tree.map(lambda x, e: np.testing.assert_array_equal(x, e + 1), new, model.unstack(params))


def test_int8_has_a_scale_for_each_output_and_stays_near(setting):
    pytest.importorskip("qwix")
    model, mesh, params = setting
    got = make_refresh(model, mesh, "int8")(params)
    layer, exact = got["layers"]["1"], model.unstack(params)["layers"]["1"]
    for name, axes in (("q", (0,)), ("out", (0, 1))):
        w, e = layer["attention"][name], np.asarray(exact["attention"][name])
        assert w.qvalue.dtype == jnp.int8 and w.qvalue.shape == e.shape
        assert w.scale.shape == tuple(1 if a in axes else n for a, n in enumerate(e.shape))
        step = np.abs(e).max(axes, keepdims=True) / 127
        assert (np.abs(np.asarray(w.qvalue * w.scale) - e) <= 0.51 * step).all()
    assert "tensor" in str(layer["attention"]["q"].qvalue.sharding.spec)
    assert got["embed"].dtype == layer["attention"]["q_bias"].dtype == jnp.float32

    plain = dataclasses.replace(model, mesh=None)
    tokens = jnp.arange(24).reshape(2, 12)
    positions = jnp.tile(jnp.arange(12), (2, 1))
    one = make_mesh(devices=jax.devices()[:1])
    local = jax.device_put(jax.tree.map(np.asarray, params))
    hidden = [
        plain.extend(make_refresh(plain, one, dtype)(local), tokens, positions, plain.init_cache(2, 12))[0]
        for dtype in ("float32", "int8")
    ]
    difference = np.abs(np.asarray(hidden[0] - hidden[1]))
    assert 1e-5 < difference.mean() < 0.02


def test_experts_in_int8(setting):
    pytest.importorskip("qwix")
    scratch = dict(
        SCRATCH, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    model = Model(ModelConfig.from_scratch(scratch, vocab_size=64))
    mesh = make_mesh(devices=jax.devices()[:1])
    params = model.init(jax.random.key(0), mesh)
    tokens, positions = jnp.arange(12)[None], jnp.arange(12)[None]
    hidden = []
    for dtype in ("float32", "int8"):
        weights = make_refresh(model, mesh, dtype)(params)
        hidden.append(model.extend(weights, tokens, positions, model.init_cache(1, 12))[0])
    assert weights["layers"]["0"]["mlp"]["gate"].scale.shape == (4, 1, 16)
    assert np.abs(np.asarray(hidden[0] - hidden[1])).mean() < 0.1
