"""Ten layers and more: names of layers are numbers, and "10" comes after "9"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import Model, ModelConfig

SIZES = dict(hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8)


@pytest.mark.parametrize(
    "family", [dict(model_type="llama"), dict(model_type="gemma3_text", sliding_window=4)]
)
def test_deep_models_keep_the_order_of_their_layers(family):
    """The scanned, the unrolled and the cached pass agree on a model of 23 layers."""
    model = Model(ModelConfig.from_scratch(dict(**family, num_hidden_layers=23, **SIZES), vocab_size=31))
    params = jax.tree.map(lambda x: 4 * x, model.init(jax.random.key(0)))
    tokens = np.random.default_rng(0).integers(0, 31, (2, 9)).astype(np.int32)
    positions, segments = np.tile(np.arange(9), (2, 1)), np.ones_like(tokens)
    unstacked = model.unstack(params)
    forward = jax.jit(lambda p: model.hidden_states(p, tokens, positions, segments)[0])
    expected = forward(params)
    cached, _ = jax.jit(model.extend)(unstacked, tokens, positions, model.init_cache(2, 12))
    assert jnp.std(expected) > 0.1
    np.testing.assert_allclose(forward(unstacked), expected, atol=1e-4)
    np.testing.assert_allclose(cached, expected, atol=1e-4)
