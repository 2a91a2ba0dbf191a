"""The loss op equals log-probs followed by the loss: value, metrics and gradients, whatever computes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.mesh.axes import MeshConfig, make_mesh
from jaxrl.ops.token_loss import token_loss

R, S, D, V = 8, 37, 24, 336
HEAD = dict(temperature=0.9, soft_cap=8.0, vocab_limit=301)


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(R, S, D)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(V, D)) * 0.7, jnp.float32)
    targets = jnp.asarray(rng.integers(0, 301, (R, S)))
    mask = rng.random((R, S)) < 0.6
    mask[3] = False
    old = -rng.random((R, S)) * 3 - 4
    advantages = rng.normal(size=(R, S))
    operands = {
        "old": jnp.asarray(old, jnp.float32),
        "advantages": jnp.asarray(advantages, jnp.float32),
        "mask": jnp.asarray(mask),
    }
    return hidden, head, targets, operands["mask"], operands


def clipped(log_probs, entropies, operands, entropy_coef=0.0, sequence=False):
    """A clipped ratio, of tokens or of whole rows, with an entropy bonus."""
    log_ratio = jnp.where(operands["mask"], log_probs - operands["old"], 0.0)
    if sequence:
        log_ratio = jnp.mean(log_ratio, axis=1, keepdims=True) + 0.0 * log_ratio
    ratio = jnp.exp(jnp.minimum(log_ratio, 2.0))
    objective = jnp.minimum(
        ratio * operands["advantages"], jnp.clip(ratio, 0.8, 1.2) * operands["advantages"]
    )
    losses = -objective - entropy_coef * entropies if entropy_coef else -objective
    metrics = {"entropy": jnp.sum(entropies), "ratio_max": jnp.max(ratio)}
    return jnp.sum(jnp.where(operands["mask"], losses, 0.0)) / 50, metrics


LOSSES = {
    "token": clipped,
    "token, entropy": functools.partial(clipped, entropy_coef=0.3),
    "sequence": functools.partial(clipped, sequence=True),
    "sequence, entropy": functools.partial(clipped, sequence=True, entropy_coef=0.3),
}


def answer(loss, mask="given", **options):
    hidden, head, targets, given, operands = inputs()

    def f(hidden, head):
        chosen = given if isinstance(mask, str) else mask
        return token_loss(hidden, head, targets, chosen, operands, loss, **HEAD, **options)

    return jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(hidden, head)


@functools.cache
def expected(name):
    return answer(LOSSES[name], implementation="reference")


def assert_close(got, want, tolerance=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, float(jnp.abs(b).max())))


WAYS = {
    "chunked": dict(implementation="chunked"),
    "one pass": dict(implementation="chunked", token_local=True),
    "pallas": dict(implementation="pallas"),
}


@pytest.mark.parametrize(
    "way,name",
    [(way, name) for way in WAYS for name in LOSSES if way != "one pass" or not name.startswith("sequence")],
)
def test_equals_the_reference(way, name):
    assert_close(answer(LOSSES[name], **WAYS[way]), expected(name))


@pytest.mark.parametrize(
    "way,split",
    [
        ("chunked", dict(data=2, fsdp=2, tensor=2)),
        ("chunked", dict(fsdp=4, tensor=2)),
        ("one pass", dict(data=8)),
        ("one pass", dict(fsdp=8)),
        ("pallas", dict(data=2, fsdp=2, tensor=2)),
    ],
)
def test_sharded_equals_unsharded(way, split):
    mesh = make_mesh(MeshConfig(**{"data": 1, **split}))
    assert_close(answer(LOSSES["token"], mesh=mesh, **WAYS[way]), expected("token"))


@pytest.mark.parametrize("way", WAYS)
def test_an_empty_mask_gives_zero(way):
    mask = jnp.zeros((R, S), bool)

    def loss(log_probs, entropies, operands):
        return jnp.sum(log_probs * operands["advantages"] + entropies), {}

    (value, _), gradients = answer(loss, mask=mask, **WAYS[way])
    assert value == 0 and not any(np.any(g) for g in gradients)


def test_no_mask_scores_every_token():
    def loss(log_probs, entropies, operands):
        return jnp.sum(log_probs * operands["advantages"]), {}

    want = answer(loss, mask=None, implementation="reference")
    for options in WAYS.values():
        assert_close(answer(loss, mask=None, **options), want)


@pytest.mark.parametrize("token_local,products", [(True, 3), (False, 4)])
def test_the_fewest_products_with_the_head(token_local, products):
    """Counted in the program: logits, gradients of hidden states and head, and the logits again if the loss
    needs all log-probs first."""
    hidden, head, targets, mask, operands = inputs()

    def f(hidden, head):
        return token_loss(
            hidden, head, targets, mask, operands, clipped, token_local=token_local, implementation="chunked"
        )[0]

    program = str(jax.make_jaxpr(jax.grad(f, (0, 1)))(hidden, head))
    assert program.count("dot_general[") == products
