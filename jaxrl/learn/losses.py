"""The policy loss of the whole family: one formula whose factors ``AlgoConfig`` chooses.

    loss = sum over tokens of  loss_weight * (sampler_weight * objective(ratio, advantage)
                                              + kl_coef * KL - entropy_coef * entropy)

The weights come from ``loss_weights``, computed once for a whole update, so that micro-batches and devices
add up exactly.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import import_by_path
from jaxrl.learn.kl import MAX_LOG_RATIO, estimate
from jaxrl.recipes.config import AlgoConfig
from jaxrl.types import Metric, TrainBatch

Metrics = dict[str, Metric]
"""By name; each says how it adds up."""

LOG_PROB_FLOOR = -1e4
"""Log-probs below (-inf included) count as this, so that differences of them stay finite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """What an objective sees of a micro-batch: [R, T] float32, nats, 0 at tokens that are not scored."""

    log_probs: jax.Array
    """Of the policy, with gradient."""
    entropies: jax.Array
    """Of the policy, with gradient."""
    old_log_probs: jax.Array
    """The policy's own values without gradient where the batch has none: ratio exactly 1."""
    rollout_log_probs: jax.Array | None
    ref_log_probs: jax.Array | None
    advantages: jax.Array
    log_ratio: jax.Array
    """log(policy / old) at ``ratio_level``, with gradient."""
    mask: jax.Array
    """1 at scored tokens."""
    sample_ids: jax.Array
    """int32; 1, 2, ... number the samples of a row: sequences, or episodes with all their rows."""

    @property
    def ratio(self) -> jax.Array:
        """exp(log_ratio), finite; saturates at exp(20)."""
        return _exp(self.log_ratio)

    def sequence_sum(self, values: jax.Array) -> jax.Array:
        """Sum of values [R, T] over the scored tokens of a sample, at each of its tokens."""
        return _sequence_sum(values * self.mask, self.sample_ids)

    def sequence_mean(self, values: jax.Array) -> jax.Array:
        """Mean of values [R, T] over the scored tokens of a sample, at each of its tokens."""
        return self.sequence_sum(values) / jnp.maximum(_sequence_sum(self.mask, self.sample_ids), 1.0)


def clip(terms: Terms, config: AlgoConfig) -> jax.Array:
    """-min(r A, clip(r) A) (PPO, arXiv:1707.06347, eq. 7).

    Where A < 0 at most -clip_dual A: dual clip (arXiv:1912.09729, eq. 5), two-sided clip (arXiv:2505.07291).
    """
    ratio, advantages = terms.ratio, terms.advantages
    bounded = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    loss = -jnp.minimum(ratio * advantages, bounded * advantages)
    if config.clip_dual is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -config.clip_dual * advantages), loss)
    return loss


def cispo(terms: Terms, config: AlgoConfig) -> jax.Array:
    """-clip(r) A log p, clip(r) constant: no token loses its gradient (MiniMax-M1, arXiv:2506.13585)."""
    weight = jax.lax.stop_gradient(jnp.clip(terms.ratio, config.cispo_low, config.cispo_high))
    return -weight * terms.advantages * terms.log_probs


def reinforce(terms: Terms, config: AlgoConfig) -> jax.Array:
    """-A log p (Williams 1992)."""
    return -terms.advantages * terms.log_probs


def nll(terms: Terms, config: AlgoConfig) -> jax.Array:
    """-log p: supervised."""
    return -terms.log_probs


OBJECTIVES: Mapping[str, Callable[[Terms, AlgoConfig], jax.Array]] = {
    "clip": clip,
    "cispo": cispo,
    "reinforce": reinforce,
    "nll": nll,
}


def policy_loss(
    log_probs: jax.Array, entropies: jax.Array, batch: TrainBatch, config: AlgoConfig
) -> tuple[jax.Array, Metrics]:
    """Loss and metrics of one micro-batch of packed rows.

    Args:
        log_probs: [R, T] nats, of ``batch.tokens`` under the policy.
        entropies: [R, T] nats.
        batch: one micro-batch, arrays [R, T]. ``old_log_probs`` None: the policy itself (ratio exactly
            1, gradient alive). ``rollout_log_probs`` None: no sampler metrics. Values at unscored tokens
            never matter.
        config: static.

    Returns:
        Scalar float32, this micro-batch's share of the update's loss, and its share of the metrics.

    Raises:
        ValueError: the config needs log-probs that the batch lacks.
    """
    terms = _terms(log_probs, entropies, batch, config)
    objective = OBJECTIVES.get(config.objective) or import_by_path(config.objective, "algo.objective")
    per_token = {"loss/policy": _constant_weight(terms, config) * objective(terms, config)}
    if config.uses_reference and config.kl_in == "loss":
        per_token["loss/kl"] = config.kl_coef * _kl_to_reference(terms, config)
    if config.entropy_coef:
        per_token["loss/entropy"] = -config.entropy_coef * terms.entropies

    weights = jnp.where(terms.mask > 0, batch.loss_weights, 0.0)
    losses = {name: jnp.sum(weights * values) for name, values in per_token.items()}
    total = losses["loss/total"] = sum(losses.values(), start=jnp.float32(0))
    shares = {name: Metric(total=value, reduction="sum") for name, value in losses.items()}
    return total, jax.lax.stop_gradient({**shares, **_metrics(terms, config)})


def with_router_loss(
    loss: jax.Array,
    metrics: Metrics,
    micro: TrainBatch,
    update_tokens: jax.Array,
    config: AlgoConfig,
    *,
    router_loss: jax.Array,
    load_max: jax.Array,
) -> tuple[jax.Array, Metrics]:
    """A micro-batch's loss and metrics with the load-balancing loss of its experts (see ``models/moe.py``).

    That loss is of a product of two means, over all tokens of a micro-batch on all devices. Micro-batches
    weigh by their tokens; another ``batch.micro_batch_tokens`` gives another, equally good estimate.

    Args:
        update_tokens: tokens of all micro-batches of the update, padding left out.
    """
    tokens = jnp.sum(micro.segment_ids > 0).astype(jnp.float32)
    share = config.router_loss_coef * router_loss * tokens / jnp.maximum(update_tokens, 1)
    loss = loss + share
    found = {
        "loss/router": Metric(total=share, reduction="sum"),
        "loss/total": Metric(total=loss, reduction="sum"),
        "moe/router_loss": mean_of(router_loss, tokens),
        "moe/load_max": Metric(total=load_max, reduction="max"),
    }
    return loss, {**metrics, **jax.lax.stop_gradient(found)}


def token_local(config: AlgoConfig) -> bool:
    """Whether the loss of a token depends on nothing of the other tokens (see ``ops.policy_loss``)."""
    corrected = config.sampler_correction != "none" and not config.supervised
    return (
        config.objective in OBJECTIVES
        and config.ratio_level == "token"
        and config.off_policy_mask is None
        and not (corrected and config.sampler_level == "sequence")
    )


def loss_weights(
    num_tokens: np.ndarray,
    config: AlgoConfig,
    *,
    max_completion_tokens: int,
    truncated: np.ndarray | None = None,
) -> np.ndarray:
    """Weight of each scored token of each sequence, for one whole update (all micro-batches, all devices).

    A token's weight is that of its sequence times its loss_mask. token_mean: 1 / all tokens; sequence_mean:
    1 / (B n_i); constant: 1 / (B Lmax). B counts every sequence, or those with a scored token
    (``empty_sequences``).

    Args:
        num_tokens: int [B] scored tokens (ones of the loss_mask) of each sequence in the update.
        max_completion_tokens: the rollout's limit, the Lmax where ``constant_length_tokens`` is null.
        truncated: bool [B], hit the token limit; with ``mask_truncated`` these count as having no scored
        token,
            and their loss_mask has to be cleared too.

    Returns:
        float32 [B]; 0 for sequences that are not trained on, all 0 when there is none.
    """
    scored = np.asarray(num_tokens, np.float64)
    if config.mask_truncated and truncated is not None:
        scored = np.where(truncated, 0.0, scored)
    sequences = np.count_nonzero(scored) if config.empty_sequences == "skip" else len(scored)
    if config.aggregation == "token_mean":
        divisor = np.full_like(scored, scored.sum())
    elif config.aggregation == "sequence_mean":
        divisor = sequences * scored
    else:
        divisor = np.full_like(scored, sequences * (config.constant_length_tokens or max_completion_tokens))
    return np.where(scored > 0, 1.0 / np.maximum(divisor, 1.0), 0.0).astype(np.float32)


def merge_metrics(a: Metrics, b: Metrics) -> Metrics:
    """Metrics of two micro-batches together (same names)."""

    def merge(x: Metric, y: Metric) -> Metric:
        add = jnp.maximum if x.reduction == "max" else jnp.add
        return jax.tree.map(add, x, y)

    return {name: merge(metric, b[name]) for name, metric in a.items()}


def of_update(metrics: Metrics) -> Metrics:
    """Metrics of all micro-batches as those of one update: a sum over them is a number of the update, and of
    several updates the mean counts."""
    return {
        name: mean_of(m.total, jnp.ones_like(m.total)) if m.reduction == "sum" else m
        for name, m in metrics.items()
    }


def mean_of(values: jax.Array, weights: jax.Array) -> Metric:
    """Weighted mean of equally shaped arrays."""
    return Metric(total=jnp.sum(weights * values), weight=jnp.sum(weights), reduction="mean")


def finish_metrics(*updates: Metrics) -> dict[str, float]:
    """Plain numbers for the log, over one update or several; a mean over nothing is left out."""
    result = {}
    for name in dict.fromkeys(name for metrics in updates for name in metrics):
        found = [metrics[name] for metrics in updates if name in metrics]
        totals = [float(metric.total) for metric in found]
        if found[0].reduction == "max":
            result[name] = max(totals)
        elif found[0].reduction == "sum":
            result[name] = math.fsum(totals)
        elif (weight := math.fsum(float(metric.weight) for metric in found)) > 0:
            result[name] = math.fsum(totals) / weight
    return result


def _terms(log_probs: jax.Array, entropies: jax.Array, batch: TrainBatch, config: AlgoConfig) -> Terms:
    """The batch with everything unscored set to 0, so that it cannot matter, not even as NaN."""
    scored = batch.loss_mask > 0

    def clean(values: jax.Array) -> jax.Array:
        return jnp.where(scored, values, 0.0).astype(jnp.float32)

    def clean_log_probs(values: jax.Array | None) -> jax.Array | None:
        return None if values is None else jnp.maximum(clean(values), LOG_PROB_FLOOR)

    policy = jnp.maximum(clean(log_probs), LOG_PROB_FLOOR)
    old = clean_log_probs(batch.old_log_probs)
    old = jax.lax.stop_gradient(policy) if old is None else old
    terms = Terms(
        log_probs=policy,
        entropies=clean(entropies),
        old_log_probs=old,
        rollout_log_probs=clean_log_probs(batch.rollout_log_probs),
        ref_log_probs=clean_log_probs(batch.ref_log_probs),
        advantages=jnp.zeros_like(policy) if config.supervised else clean(batch.advantages),
        log_ratio=policy - old,
        mask=scored.astype(jnp.float32),
        sample_ids=batch.segment_ids if batch.sample_ids is None else batch.sample_ids,
    )
    if config.ratio_level == "sequence":  # GSPO, arXiv:2507.18071, eq. 7
        return dataclasses.replace(terms, log_ratio=terms.sequence_mean(terms.log_ratio))
    if config.ratio_level == "sequence_sum":
        return dataclasses.replace(terms, log_ratio=terms.sequence_sum(terms.log_ratio))
    return terms


def _constant_weight(terms: Terms, config: AlgoConfig) -> jax.Array:
    """Factor of the policy loss that carries no gradient: sampler correction and off-policy mask."""
    weight = terms.mask
    if config.sampler_correction != "none" and not config.supervised:
        weight = weight * _sampler_weight(_sampler_ratio(terms, config), config)
    if config.off_policy_mask is not None:
        # DeepSeek-V3.2 (arXiv:2512.02556), section 3.1: against the sampler's own log-probs, so that both
        # the updates since then and the difference between sampler and trainer count.
        sampled = terms.old_log_probs if terms.rollout_log_probs is None else terms.rollout_log_probs
        drift = terms.sequence_mean(sampled - terms.log_probs)
        weight = jnp.where((terms.advantages < 0) & (drift > config.off_policy_mask), 0.0, weight)
    return jax.lax.stop_gradient(weight)


def _kl_to_reference(terms: Terms, config: AlgoConfig) -> jax.Array:
    """Per-token KL penalty, with gradient."""
    if terms.ref_log_probs is None:
        raise ValueError("kl_coef > 0 in the loss needs ref_log_probs in the batch")
    kl = estimate(terms.log_probs, terms.ref_log_probs, config.kl_estimator)
    if not config.kl_unbiased:
        return kl
    ratio = _exp(terms.log_probs - terms.old_log_probs)
    # k1 and k3 have the right value, so the gradient of ratio x value is that of the KL. k2 and k3plus have
    # the right gradient, which the ratio weighs.
    return kl * (jax.lax.stop_gradient(ratio) if config.kl_estimator in ("k2", "k3plus") else ratio)


def _sampler_ratio(terms: Terms, config: AlgoConfig) -> jax.Array:
    """trainer / sampler probability of a token or of its whole sequence."""
    if terms.rollout_log_probs is None:
        raise ValueError("sampler_correction needs rollout_log_probs in the batch")
    log_ratio = terms.old_log_probs - terms.rollout_log_probs
    return _exp(terms.sequence_sum(log_ratio) if config.sampler_level == "sequence" else log_ratio)


def _sampler_weight(ratio: jax.Array, config: AlgoConfig) -> jax.Array:
    """Truncated or masked importance weight: bounded variance for a little bias."""
    if config.sampler_correction == "truncate":
        return jnp.clip(ratio, config.sampler_min, config.sampler_max)
    return jnp.where((ratio < config.sampler_min) | (ratio > config.sampler_max), 0.0, ratio)


def _metrics(terms: Terms, config: AlgoConfig) -> Metrics:
    """What people watch. Means over scored tokens, but those of a sequence's ratio over sequences."""
    mask, old = terms.mask, terms.old_log_probs

    def mean(values: jax.Array) -> Metric:
        return mean_of(values, mask)

    def largest(values: jax.Array) -> Metric:
        return Metric(total=jnp.max(mask * values), reduction="max")

    metrics: Metrics = {"algo/entropy": mean(terms.entropies)}
    if config.supervised:
        return metrics
    metrics["algo/kl_old"] = mean(estimate(old, terms.log_probs, "k3"))
    if config.uses_reference and config.kl_in == "loss":
        metrics["algo/kl"] = mean(_kl_to_reference(terms, config))
    metrics["algo/ratio_max"] = largest(terms.ratio)
    # A sequence's tokens share 1, so that sums over tokens are sums over sequences.
    share = mask if config.ratio_level == "token" else mask / jnp.maximum(terms.sequence_sum(mask), 1.0)
    metrics["algo/ratio_mean"] = mean_of(terms.ratio, share)
    cut = _cut(terms, config)
    if cut:
        metrics["algo/clip_fraction"] = mean_of(functools.reduce(jnp.logical_or, cut.values()), share)
    for side, where in cut.items():
        metrics[f"algo/clip_{side}_fraction"] = mean_of(where, share)
    if terms.rollout_log_probs is not None:
        difference = jnp.abs(terms.rollout_log_probs - old)
        metrics["sampler/log_prob_diff_mean"] = mean(difference)
        metrics["sampler/log_prob_diff_max"] = largest(difference)
        metrics["sampler/kl"] = mean(estimate(terms.rollout_log_probs, old, "k3"))
    if config.sampler_correction != "none":
        sampler_ratio = _sampler_ratio(terms, config)
        outside = (sampler_ratio < config.sampler_min) | (sampler_ratio > config.sampler_max)
        metrics["sampler/weight_mean"] = mean(_sampler_weight(sampler_ratio, config))
        metrics["sampler/clipped_fraction"] = mean(outside)
    return metrics


def _cut(terms: Terms, config: AlgoConfig) -> dict[str, jax.Array]:
    """Where a bound of the objective acts, by its name: [R, T] bool; {} for objectives without bounds.

    clip: the token loses its gradient, which its advantage's sign decides. cispo: its weight is bounded,
    either way.
    """
    ratio, gains, loses = terms.ratio, terms.advantages > 0, terms.advantages < 0
    if config.objective == "clip":
        cut = {"low": (ratio < 1 - config.clip_low) & loses, "high": (ratio > 1 + config.clip_high) & gains}
        if config.clip_dual is not None:
            cut["dual"] = (ratio > config.clip_dual) & loses
        return cut
    if config.objective == "cispo":
        either = gains | loses
        return {"low": (ratio < config.cispo_low) & either, "high": (ratio > config.cispo_high) & either}
    return {}


def _exp(log_ratio: jax.Array) -> jax.Array:
    return jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))


def _sequence_sum(values: jax.Array, sample_ids: jax.Array) -> jax.Array:
    """[R, T] sum over each sample of a row, at each of its tokens. T tokens hold at most T samples."""

    def row(values: jax.Array, samples: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, samples, num_segments=values.shape[0] + 1)[samples]

    return jax.vmap(row)(values, sample_ids)
