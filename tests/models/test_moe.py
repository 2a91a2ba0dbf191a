"""The router's loss."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxrl.models.moe import router_loss

E, PER_TOKEN = 4, 2


def test_router_loss_is_smallest_when_balanced():
    balanced = router_loss(jnp.full(E, 6.0), jnp.full(E, 3.0), jnp.asarray(12), num_layers=1)
    np.testing.assert_allclose(balanced, PER_TOKEN, rtol=1e-6)
    skewed = router_loss(
        jnp.array([12.0, 12.0, 0, 0]), jnp.array([6.0, 6.0, 0, 0]), jnp.asarray(12), num_layers=1
    )
    np.testing.assert_allclose(skewed, 2 * PER_TOKEN, rtol=1e-6)
    assert router_loss(jnp.zeros(E), jnp.zeros(E), jnp.asarray(0), num_layers=1) == 0
