"""KL estimators against verl's values and gradients, and what makes each of them right."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from policy_losses import batch_of, policy_loss

from jaxrl.learn.losses.kl import estimate
from jaxrl.recipes.grpo import Grpo

FOLDER = pathlib.Path(__file__).parent.parent / "fixtures" / "losses"
ESTIMATORS = ["k1", "k2", "k3", "k3plus"]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_value_and_gradient(estimator):
    x, goldens = np.load(FOLDER / "inputs.npz"), np.load(FOLDER / "kl_entropy_agg.npz")
    on_host = estimate(x["logp"], x["ref_logp"], estimator)
    on_device = estimate(jnp.asarray(x["logp"]), jnp.asarray(x["ref_logp"]), estimator)
    assert isinstance(on_host, np.ndarray) and isinstance(on_device, jax.Array)
    for value in (on_host, on_device):
        np.testing.assert_allclose(value, goldens[f"kl_{estimator}"], atol=2e-6)
    gradient = jax.grad(lambda p: (estimate(p, x["ref_logp"], estimator) * x["mask"]).sum())(x["logp"])
    np.testing.assert_allclose(gradient, goldens[f"kl_{estimator}_grad_of_masked_sum"], atol=2e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("difference", [-1e4, -100.0, 100.0, 1e4])
def test_far_apart_policies_give_finite_values_and_gradients(estimator, difference):
    log_probs, ref = np.float32([-1.0]), np.float32([-1.0 - difference])
    value, gradient = jax.value_and_grad(lambda p: estimate(p, ref, estimator).sum())(log_probs)
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_equal_policies_have_no_divergence_and_only_k1_pulls():
    log_probs = np.float32([-3.0, -0.5])
    for estimator in ESTIMATORS:
        value, gradient = jax.value_and_grad(lambda p, e=estimator: estimate(p, log_probs, e).sum())(
            log_probs
        )
        assert float(value) == 0.0
        assert bool(np.asarray(gradient).any()) == (estimator == "k1")


def test_expectation_under_the_policy_is_the_divergence_for_k1_and_k3():
    policy, ref = np.float32([0.5, 0.3, 0.2]), np.float32([0.2, 0.3, 0.5])
    exact = np.sum(policy * np.log(policy / ref))
    for estimator in ("k1", "k3", "k3plus"):
        mean = np.sum(policy * np.asarray(estimate(np.log(policy), np.log(ref), estimator)))
        np.testing.assert_allclose(mean, exact, rtol=1e-5)


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k4"):
        estimate(np.zeros(1), np.zeros(1), "k4")


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("on_policy", [True, False])
def test_with_kl_unbiased_the_expected_gradient_is_that_of_the_divergence(estimator, on_policy):
    """Exactly, over six tokens that come from another policy than the one that is updated, or from it."""
    rng = np.random.default_rng(0)
    logits, other, ref = (rng.normal(size=6).astype(np.float32) for _ in range(3))
    old = jax.nn.log_softmax(logits if on_policy else other)
    ones, ids = np.ones((1, 6), np.float32), np.arange(6)[None]
    batch = batch_of(
        tokens=ids,
        positions=ids,
        segment_ids=ids + 1,
        loss_mask=ones,
        loss_weights=np.exp(old)[None],
        advantages=0 * ones,
        rollout_log_probs=old[None],
        old_log_probs=old[None],
        ref_log_probs=jax.nn.log_softmax(ref)[None],
    )

    def expected(logits, **settings):
        config = Grpo(kl_coef=1.0, kl_estimator=estimator, sampler_correction="none", **settings)
        return policy_loss(jax.nn.log_softmax(logits)[None], 0 * ones, batch, config)[0]

    def divergence(p, q):
        return jnp.sum(jax.nn.softmax(p) * (jax.nn.log_softmax(p) - jax.nn.log_softmax(q)))

    found, exact = jax.grad(expected)(logits, kl_unbiased=True), jax.grad(divergence)(logits, ref)
    np.testing.assert_allclose(found, exact, atol=1e-6)
    if on_policy:  # the ratio is 1, and its gradient is all that k1 and k3 lack
        plain = jax.grad(expected)(logits)
        reverse = jax.grad(lambda p: divergence(ref, p))(logits)
        want = {"k1": 0 * exact, "k2": exact, "k3": reverse, "k3plus": exact}[estimator]
        np.testing.assert_allclose(plain, want, atol=1e-6)
