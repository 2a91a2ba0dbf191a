"""The policy loss of the GRPO family: one formula whose factors ``PolicyLossConfig`` chooses.

loss of a token = sampler_weight * objective(ratio, advantage) + kl_coef * KL - entropy_coef * entropy
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.config import setting
from jaxrl.learn.losses.kl import MAX_LOG_RATIO, estimate
from jaxrl.learn.losses.loss import Loss, Statistics, floored, name_problems, objective, weighted_sum
from jaxrl.learn.losses.loss import Terms as TokenTerms
from jaxrl.learn.metrics import Metrics, largest_of, mean_of
from jaxrl.types import ADVANTAGES, OLD_LOG_PROBS, REF_LOG_PROBS, ROLLOUT_LOG_PROBS, Column, TrainBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """Settings of the policy loss of one token."""

    objective: str = setting(
        "clip",
        "loss of one token: clip (PPO's pessimistic bound), cispo (bounded weight without gradient), "
        "reinforce (no ratio), or the import path of f(terms, config) -> loss of each token [R, T]",
    )
    ratio_level: Literal["token", "sequence", "sequence_sum"] = setting(
        "token",
        "likelihood ratio policy / old: of each token, of the sequence per token (geometric mean, GSPO), or "
        "of the whole sequence (product, RLOO)",
    )
    clip_low: float = setting(0.2, "objective clip: the ratio counts no lower than 1 - clip_low")
    clip_high: float = setting(0.28, "objective clip: the ratio counts no higher than 1 + clip_high")
    clip_dual: float | None = setting(
        None,
        "objective clip: upper bound on the ratio where the advantage is negative (dual clip); null: none",
    )
    cispo_low: float = setting(0.0, "objective cispo: smallest weight (a ratio); 0: no lower bound")
    cispo_high: float = setting(5.0, "objective cispo: largest weight (a ratio)")
    off_policy_mask: float | None = setting(
        None,
        "drop sequences of negative advantage whose mean of rollout - policy log-probs exceeds this (nats "
        "per token): earlier updates and the sampler's difference count alike; null: keep all",
    )

    kl_coef: float = setting(0.0, "weight of the KL penalty to the reference; 0: no reference is loaded")
    kl_in: Literal["loss", "reward"] = setting(
        "loss",
        "penalty as a loss of each token, or taken off the reward (after its division by advantage_std, so "
        "that kl_coef weighs the same)",
    )
    kl_estimator: Literal["k1", "k2", "k3", "k3plus"] = setting(
        "k3", "estimator of the KL (Schulman 2020); k3plus: value of k3, gradient of k2"
    )
    kl_unbiased: bool = setting(
        False,
        "multiply the KL term by the policy / old ratio of the token, so that its gradient is that of the KL "
        "off policy too",
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus (loss per nat)")
    sampler_correction: Literal["none", "truncate", "mask"] = setting(
        "truncate", "weight by old / rollout probability: not, clamped to the bounds, or 0 outside the bounds"
    )
    sampler_level: Literal["token", "sequence"] = setting("token", "that weight is of each token or sequence")
    sampler_min: float = setting(0.0, "lower bound of the weight")
    sampler_max: float = setting(2.0, "upper bound of the weight")

    def loss_problems(self) -> Iterator[tuple[str, str]]:
        """Settings out of range, contradicting each other or giving a wrong gradient: (key, message)."""
        if self.objective == "nll":
            yield "objective", "'nll' given; supervised training is algo.name: sft"
        else:
            yield from name_problems("objective", self.objective, OBJECTIVES)
        for key in ("clip_high", "cispo_low", "sampler_min", "kl_coef"):
            if getattr(self, key) < 0:
                yield key, f"{getattr(self, key)} given; it must be at least 0"
        if not 0 <= self.clip_low <= 1:
            yield "clip_low", f"{self.clip_low} given; 1 - clip_low bounds a ratio, so it must be from 0 to 1"
        if self.clip_dual is not None and not self.clip_dual > 1 + self.clip_high:
            bound = f"1 + clip_high = {1 + self.clip_high:g}"
            yield "clip_dual", f"{self.clip_dual} given; it must lie above the ordinary upper bound {bound}"
        if not self.cispo_low < 1 < self.cispo_high:
            yield (
                "cispo_low" if self.cispo_low >= 1 else "cispo_high",
                f"[{self.cispo_low}, {self.cispo_high}] leaves out the ratio 1 of unchanged tokens; the "
                "bounds are ratios themselves (not 1 + epsilon): cispo_low < 1 < cispo_high",
            )
        if not self.sampler_min < 1 < self.sampler_max:
            yield (
                "sampler_min" if self.sampler_min >= 1 else "sampler_max",
                f"[{self.sampler_min}, {self.sampler_max}] leaves out the weight 1 of exact agreement; "
                "expected sampler_min < 1 < sampler_max",
            )
        if self.kl_coef and self.kl_in == "loss" and self.kl_estimator == "k1" and not self.kl_unbiased:
            yield (
                "kl_estimator",
                "k1 as a loss has a gradient of mean 0 that does not depend on the reference; use k2 or k3, "
                "or kl_unbiased: true, or kl_in: reward",
            )
        if self.kl_coef and self.kl_in == "reward" and self.kl_estimator == "k3plus":
            yield (
                "kl_estimator",
                "k3plus differs from k3 in its gradient only, and a reward has none; use k1 or k3",
            )
        sequence_weight = self.sampler_correction == "none" or self.sampler_level == "sequence"
        if self.ratio_level != "token" and self.objective == "clip" and not sequence_weight:
            yield (
                "sampler_level",
                f"ratio_level: {self.ratio_level} makes a sequence one action, and the weights of its tokens "
                "would multiply its gradient by their mean; use sequence, or sampler_correction: none",
            )

    def loss_dead_keys(self, *, off_policy: bool) -> Iterator[tuple[str, str]]:
        """Keys that have no effect, each with the reason."""
        clip, cispo = ("clip_low", "clip_high", "clip_dual"), ("cispo_low", "cispo_high")
        sampler = ("sampler_level", "sampler_min", "sampler_max")
        builtin = self.objective in OBJECTIVES
        one_update = "one update per rollout (num_minibatches x epochs = 1): every ratio is exactly 1"
        rules = (
            (not off_policy and builtin, (*clip, *cispo), one_update),
            (builtin and self.objective != "clip", clip, f"objective is {self.objective}"),
            (builtin and self.objective != "cispo", cispo, f"objective is {self.objective}"),
            (self.objective == "reinforce", ("ratio_level",), "objective reinforce uses no ratio"),
            (self.kl_coef == 0, ("kl_in", "kl_estimator", "kl_unbiased"), "kl_coef is 0"),
            (self.kl_in == "reward", ("kl_unbiased",), "kl_in is reward"),
            (self.sampler_correction == "none", sampler, "sampler_correction is none"),
        )
        yield from ((key, reason) for applies, keys, reason in rules if applies for key in keys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms(TokenTerms):
    """Inputs of an objective, of one micro-batch: [R, T] float32, nats, 0 at tokens that are not learned."""

    old_log_probs: jax.Array
    """The policy's own values without gradient where the batch has none: ratio exactly 1."""
    rollout_log_probs: jax.Array
    ref_log_probs: jax.Array | None
    advantages: jax.Array
    log_ratio: jax.Array
    """log(policy / old) at ``ratio_level``, with gradient."""

    @property
    def ratio(self) -> jax.Array:
        """exp(log_ratio), finite; saturates at exp(20)."""
        return _exp(self.log_ratio)


def clip(terms: Terms, config: PolicyLossConfig) -> jax.Array:
    """-min(r A, clip(r) A) (PPO, arXiv:1707.06347, eq. 7).

    Where A < 0 at most -clip_dual A: dual clip (arXiv:1912.09729, eq. 5), two-sided clip (arXiv:2505.07291).
    """
    ratio, advantages = terms.ratio, terms.advantages
    bounded = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    loss = -jnp.minimum(ratio * advantages, bounded * advantages)
    if config.clip_dual is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -config.clip_dual * advantages), loss)
    return loss


def cispo(terms: Terms, config: PolicyLossConfig) -> jax.Array:
    """-clip(r) A log p, clip(r) constant: no token loses its gradient (MiniMax-M1, arXiv:2506.13585)."""
    weight = jax.lax.stop_gradient(jnp.clip(terms.ratio, config.cispo_low, config.cispo_high))
    return -weight * terms.advantages * terms.log_probs


def reinforce(terms: Terms, config: PolicyLossConfig) -> jax.Array:
    """-A log p (Williams 1992)."""
    return -terms.advantages * terms.log_probs


OBJECTIVES: Mapping[str, Callable[[Terms, PolicyLossConfig], jax.Array]] = {
    "clip": clip,
    "cispo": cispo,
    "reinforce": reinforce,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss(Loss):
    """Loss of sampled tokens, by their advantages."""

    config: PolicyLossConfig
    off_policy: bool
    """True when a rollout makes several updates, so that the policy before them is not the policy itself."""

    @property
    def columns(self) -> tuple[Column, ...]:
        found: tuple[Column, ...] = (ADVANTAGES, ROLLOUT_LOG_PROBS)
        found += (OLD_LOG_PROBS,) if self.off_policy else ()
        return found + ((REF_LOG_PROBS,) if self._penalises_kl else ())

    @property
    def unit(self) -> Literal["token", "sample"]:
        config = self.config
        corrected = config.sampler_correction != "none" and config.sampler_level == "sequence"
        local = config.objective in OBJECTIVES and config.ratio_level == "token"
        return "token" if local and config.off_policy_mask is None and not corrected else "sample"

    def __call__(self, statistics: Statistics, micro: TrainBatch) -> tuple[jax.Array, Metrics]:
        config, terms = self.config, self.terms(statistics, micro)
        policy = objective(config.objective, OBJECTIVES)(terms, config)
        per_token = {"loss/policy": _constant_weight(terms, config) * policy}
        if self._penalises_kl:
            per_token["loss/kl"] = config.kl_coef * _kl_to_reference(terms, config)
        if config.entropy_coef:
            per_token["loss/entropy"] = -config.entropy_coef * terms.entropies
        total, metrics = weighted_sum(per_token, micro)
        return total, metrics | jax.lax.stop_gradient(self._metrics(terms))

    def terms(self, statistics: Statistics, micro: TrainBatch) -> Terms:
        """Inputs of the objective, of one micro-batch."""
        found = TokenTerms.of(statistics, micro)
        columns = found.columns
        policy = found.log_probs
        old = floored(columns["old_log_probs"]) if self.off_policy else jax.lax.stop_gradient(policy)
        terms = Terms(
            **{field.name: getattr(found, field.name) for field in dataclasses.fields(found)},
            old_log_probs=old,
            rollout_log_probs=floored(columns["rollout_log_probs"]),
            ref_log_probs=floored(columns["ref_log_probs"]) if self._penalises_kl else None,
            advantages=columns["advantages"].astype(jnp.float32),
            log_ratio=policy - old,
        )
        if self.config.ratio_level == "sequence":  # GSPO, arXiv:2507.18071, eq. 7
            return dataclasses.replace(terms, log_ratio=terms.sequence_mean(terms.log_ratio))
        if self.config.ratio_level == "sequence_sum":
            return dataclasses.replace(terms, log_ratio=terms.sequence_sum(terms.log_ratio))
        return terms

    @property
    def _penalises_kl(self) -> bool:
        return self.config.kl_coef != 0 and self.config.kl_in == "loss"

    def _metrics(self, terms: Terms) -> Metrics:
        """Metrics. Means are over learned tokens, but those of a sequence's ratio over sequences."""
        config, mask, old = self.config, terms.mask, terms.old_log_probs
        metrics: Metrics = {"algo/entropy": mean_of(terms.entropies, mask)}
        metrics["algo/kl_old"] = mean_of(estimate(old, terms.log_probs, "k3"), mask)
        if self._penalises_kl:
            metrics["algo/kl"] = mean_of(_kl_to_reference(terms, config), mask)
        metrics["algo/ratio_max"] = largest_of(terms.ratio, mask)
        # A sequence's tokens share 1, so that sums over tokens are sums over sequences.
        share = mask if config.ratio_level == "token" else mask / jnp.maximum(terms.sequence_sum(mask), 1.0)
        metrics["algo/ratio_mean"] = mean_of(terms.ratio, share)
        cut = _cut(terms, config)
        if cut:
            metrics["algo/clip_fraction"] = mean_of(functools.reduce(jnp.logical_or, cut.values()), share)
        for side, where in cut.items():
            metrics[f"algo/clip_{side}_fraction"] = mean_of(where, share)
        difference = jnp.abs(terms.rollout_log_probs - old)
        metrics["sampler/log_prob_diff_mean"] = mean_of(difference, mask)
        metrics["sampler/log_prob_diff_max"] = largest_of(difference, mask)
        metrics["sampler/kl"] = mean_of(estimate(terms.rollout_log_probs, old, "k3"), mask)
        if config.sampler_correction != "none":
            sampler_ratio = _sampler_ratio(terms, config)
            outside = (sampler_ratio < config.sampler_min) | (sampler_ratio > config.sampler_max)
            metrics["sampler/weight_mean"] = mean_of(_sampler_weight(sampler_ratio, config), mask)
            metrics["sampler/clipped_fraction"] = mean_of(outside, mask)
        return metrics


def _constant_weight(terms: Terms, config: PolicyLossConfig) -> jax.Array:
    """Factor of the policy loss that carries no gradient: sampler correction and off-policy mask."""
    weight = terms.mask
    if config.sampler_correction != "none":
        weight = weight * _sampler_weight(_sampler_ratio(terms, config), config)
    if config.off_policy_mask is not None:
        # DeepSeek-V3.2 (arXiv:2512.02556), section 3.1: against the sampler's own log-probs, so that both
        # the updates since then and the difference between sampler and trainer count.
        drift = terms.sequence_mean(terms.rollout_log_probs - terms.log_probs)
        weight = jnp.where((terms.advantages < 0) & (drift > config.off_policy_mask), 0.0, weight)
    return jax.lax.stop_gradient(weight)


def _kl_to_reference(terms: Terms, config: PolicyLossConfig) -> jax.Array:
    """Per-token KL penalty, with gradient."""
    kl = estimate(terms.log_probs, terms.ref_log_probs, config.kl_estimator)
    if not config.kl_unbiased:
        return kl
    ratio = _exp(terms.log_probs - terms.old_log_probs)
    # k1 and k3 have the right value, so the gradient of ratio x value is that of the KL. k2 and k3plus have
    # the right gradient, which the ratio weighs.
    return kl * (jax.lax.stop_gradient(ratio) if config.kl_estimator in ("k2", "k3plus") else ratio)


def _sampler_ratio(terms: Terms, config: PolicyLossConfig) -> jax.Array:
    """trainer / sampler probability of a token or of its whole sequence."""
    log_ratio = terms.old_log_probs - terms.rollout_log_probs
    return _exp(terms.sequence_sum(log_ratio) if config.sampler_level == "sequence" else log_ratio)


def _sampler_weight(ratio: jax.Array, config: PolicyLossConfig) -> jax.Array:
    """Truncated or masked importance weight: bounded variance for a little bias."""
    if config.sampler_correction == "truncate":
        return jnp.clip(ratio, config.sampler_min, config.sampler_max)
    return jnp.where((ratio < config.sampler_min) | (ratio > config.sampler_max), 0.0, ratio)


def _cut(terms: Terms, config: PolicyLossConfig) -> dict[str, jax.Array]:
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
