"""Estimators of KL(policy || reference) from one token (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MAX_LOG_RATIO = 20.0
"""Log-ratios saturate here (nats): exp(20) = 4.9e8 is finite in float32, and beyond it the gradient is 0."""


def estimate(log_probs: Any, ref_log_probs: Any, estimator: str) -> Any:
    """Per-token estimate (nats) of KL(policy || reference) for tokens that were sampled from the policy.

    k1 = log p - log ref: unbiased, right in a reward; as a loss its gradient says nothing of ref.
    k2 = (log p - log ref)^2 / 2: biased value; as a loss it has the gradient of the KL itself.
    k3 = ref / p - log(ref / p) - 1: unbiased and positive; as a loss its gradient is that of KL(ref || p).
    k3plus: value of k3, gradient of k2.

    Args:
        log_probs, ref_log_probs: any equal shapes, nats.

    Returns:
        The same shape; differentiable in both. Two numpy arrays give a numpy array, and compile nothing.
    """
    on_host = isinstance(log_probs, np.ndarray) and isinstance(ref_log_probs, np.ndarray)
    xp = np if on_host else jnp
    log_ratio = log_probs - ref_log_probs
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * xp.square(log_ratio)
    if estimator == "k3" or (estimator == "k3plus" and on_host):
        inverse = xp.minimum(-log_ratio, MAX_LOG_RATIO)
        return xp.expm1(inverse) - inverse
    if estimator == "k3plus":
        k2 = estimate(log_probs, ref_log_probs, "k2")
        k3 = estimate(log_probs, ref_log_probs, "k3")
        return k2 + jax.lax.stop_gradient(k3 - k2)
    raise ValueError(f"unknown KL estimator {estimator!r}: k1, k2, k3 or k3plus")
