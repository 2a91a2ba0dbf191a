"""What a user would write in a file of their own and name as ``algo.objective: user_objectives.py:f``."""

import jax
import jax.numpy as jnp

from jaxrl.learn.losses.policy import clip

PRESET = {"objective": "reinforce", "advantage_std": "none", "clip_low": 0.1}
NO_PRESET = ["objective"]
WRONG_PRESET = {"learning_rate": 1.0}


def sapo(terms, config):
    """Soft gate in place of the clip (SAPO, arXiv:2511.20347)."""
    tau = jnp.where(terms.advantages > 0, 1.0, 1.05)
    return -(4 / tau) * jax.nn.sigmoid(tau * (terms.ratio - 1)) * terms.advantages


def geometric_mean(terms, config):
    """Geometric mean of ratios bounded where that lowers the objective (GMPO, arXiv:2507.20673)."""
    bounded = jnp.where(
        terms.advantages > 0, jnp.minimum(terms.log_ratio, 0.4), jnp.maximum(terms.log_ratio, -0.4)
    )
    return -terms.advantages * jnp.exp(terms.sequence_mean(bounded))


def vespo(terms, config):
    """Smooth weight of the whole sequence's ratio."""
    k, lam = jnp.where(terms.advantages >= 0, 2.0, 3.0), jnp.where(terms.advantages >= 0, 3.0, 2.0)
    log_weight = jnp.clip(terms.sequence_sum(jnp.clip(terms.log_ratio, -20, 20)), jnp.log(1e-8), 20)
    weight = jnp.exp(lam + k * log_weight - lam * jnp.exp(log_weight))
    return -jax.lax.stop_gradient(weight) * terms.advantages * terms.log_probs


def sequence_masked(terms, config):
    """Clip weighted by the token's sampler ratio, in sequences whose mean of it lies in [0.9, 1.1]."""
    difference = terms.old_log_probs - terms.rollout_log_probs
    mean = jnp.exp(terms.sequence_mean(difference))
    return clip(terms, config) * jnp.exp(difference) * ((mean >= 0.9) & (mean <= 1.1))


def best_of_group(rewards):
    """An advantage as a user would write it: 1 for the best of each group."""
    return (rewards == rewards.max(axis=1, keepdims=True)).astype(float)
