"""Experts: every token reaches all of its experts, whatever the load."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.moe import router_loss, sorted_experts

B, T, D, F, E, PER_TOKEN = 2, 6, 8, 12, 4, 2


def case(balanced: bool):
    rng = np.random.default_rng(0)
    x, gate, up, down = (
        jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((B, T, D), (E, D, F), (E, D, F), (E, F, D))
    )
    weights = jnp.asarray(rng.uniform(size=(B, T, PER_TOKEN)), jnp.float32)
    chosen = (
        np.argsort(rng.uniform(size=(B, T, E)))[..., :PER_TOKEN]
        if balanced
        else np.full((B, T, PER_TOKEN), 2)
    )
    return (x, weights, gate, up, down), jnp.asarray(chosen)


def dense(x, weights, gate, up, down, chosen):
    """All experts for all tokens, then a weighted sum of the chosen."""
    hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, gate)) * jnp.einsum("btd,edf->btef", x, up)
    outputs = jnp.einsum("btef,efd->bted", hidden, down)
    return jnp.einsum("bted,btke,btk->btd", outputs, jax.nn.one_hot(chosen, E), weights)


@pytest.mark.parametrize("balanced", [True, False], ids=["balanced", "all tokens to one expert"])
def test_sorted_experts_equal_the_dense_sum_in_value_and_gradient(balanced, reference):
    args, chosen = case(balanced)

    def ours(*args):
        return sorted_experts(args[0], args[1], chosen, *args[2:], "silu")

    def theirs(*args):
        return dense(*args, chosen)

    def both(function):
        loss = lambda *a: (jnp.sum(jnp.sin(function(*a))), function(*a))  # noqa: E731
        return reference.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))(*args)

    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4), both(ours), both(theirs)
    )


def test_router_loss_is_smallest_when_balanced():
    balanced = router_loss(jnp.full(E, 6.0), jnp.full(E, 3.0), jnp.asarray(12), num_layers=1)
    np.testing.assert_allclose(balanced, PER_TOKEN, rtol=1e-6)
    skewed = router_loss(
        jnp.array([12.0, 12.0, 0, 0]), jnp.array([6.0, 6.0, 0, 0]), jnp.asarray(12), num_layers=1
    )
    np.testing.assert_allclose(skewed, 2 * PER_TOKEN, rtol=1e-6)
    assert router_loss(jnp.zeros(E), jnp.zeros(E), jnp.asarray(0), num_layers=1) == 0
