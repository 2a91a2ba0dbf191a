"""Rewards to advantages, in numpy float64 on the host. NaN is a sample whose rewards all abstained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from jaxrl.config import ConfigError, import_by_path, setting
from jaxrl.learn.losses.loss import name_problems
from jaxrl.recipes.filters import spread

BASELINES = ("group_mean", "leave_one_out", "none")
_EVERYTHING = (0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Settings of the way from rewards to advantages."""

    advantage: str = setting(
        "group_mean",
        "baseline: group_mean, leave_one_out (mean of the others), none, or the import path of "
        "f(rewards [P, G]) -> [P, G], NaN = abstained",
    )
    advantage_std: Literal["group", "batch", "none"] = setting(
        "group", "divide advantages by the standard deviation of rewards of the group, of the batch, or not"
    )
    std_epsilon: float = setting(1e-4, "added to every standard deviation that divides (reward units)")
    whiten: Literal["none", "sequence", "token"] = setting(
        "none", "bring advantages to mean 0 and variance 1 over all sequences, or over all learned tokens"
    )
    reward_combine: Literal["sum", "normalized_sum"] = setting(
        "sum", "several rewards: weighted sum, or each one normalised in its group before that sum (GDPO)"
    )
    overlong_penalty: float = setting(0.0, "largest reward taken off too long completions; 0: off")
    overlong_max_tokens: int | None = setting(
        None, "completion length with the full penalty (tokens); null: the rollout's limit"
    )
    overlong_buffer_tokens: int | None = setting(
        None, "the penalty grows linearly over this many tokens before it; null: a fifth of it, as in DAPO"
    )

    def advantage_problems(self) -> Iterator[tuple[str, str]]:
        """Settings that cannot work or contradict each other, as (key, message)."""
        yield from name_problems("advantage", self.advantage, BASELINES)
        least = {
            "std_epsilon": 0,
            "overlong_penalty": 0,
            "overlong_max_tokens": 2,
            "overlong_buffer_tokens": 1,
        }
        for key, smallest in least.items():
            value = getattr(self, key)
            if value is not None and not value >= smallest:
                yield key, f"{value} given; it must be at least {smallest}"
        if self.advantage == "none" and self.advantage_std == "group":
            yield (
                "advantage_std",
                "dividing by the deviation of the group without subtracting its mean blows up groups that "
                "are almost equal; use advantage: group_mean, or advantage_std: none",
            )
        if self.whiten != "none" and self.advantage_std == "batch":
            yield (
                "advantage_std",
                f"whiten: {self.whiten} rescales the whole batch again; keep one of whiten and "
                "advantage_std: batch",
            )
        longest = self.overlong_max_tokens
        if longest is not None and (self.overlong_buffer_tokens or 0) >= longest:
            yield (
                "overlong_buffer_tokens",
                f"{self.overlong_buffer_tokens} given; it must be less than overlong_max_tokens = {longest}",
            )

    def advantage_dead_keys(self) -> Iterator[tuple[str, str]]:
        """Keys that have no effect, each with the reason."""
        combines = self.reward_combine == "normalized_sum"
        if self.advantage_std == "none" and self.whiten == "none" and not combines:
            yield "std_epsilon", "nothing is divided by a standard deviation"
        if self.overlong_penalty == 0:
            for key in ("overlong_max_tokens", "overlong_buffer_tokens"):
                yield key, "overlong_penalty is 0"


def compute(
    rewards: np.ndarray,
    config: AdvantageConfig,
    *,
    penalty: np.ndarray | None = None,
    num_tokens: np.ndarray | None = None,
) -> np.ndarray:
    """Advantages: (rewards - baseline) / deviation, then the KL penalty, then whitening, as ``config`` says.

    A deviation is of the rewards without the KL: in a group whose rewards are all equal, KL alone would
    otherwise give advantages of full size, whatever its coefficient. As in the loss, ``kl_coef`` is thus in
    units of the divided advantage. The baseline is of the penalised reward.

    Groups whose rewards are all equal get exactly 0 under a group baseline, whitening or not. Abstained
    samples are left out of every mean and deviation and get 0. Deviations divide by n - 1.

    Args:
        rewards: float [P, G], the G completions of a prompt in a row; NaN = abstained.
        penalty: float [P, G], taken off the reward after the division: ``kl_coef`` x KL of each completion;
            None: nothing.
        num_tokens: [P, G] learned tokens of each completion; needed for ``whiten: token``.

    Returns:
        float64 [P, G].

    Raises:
        ValueError: wrong shape, an infinite reward, or a missing argument.
    """
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 2 or np.isinf(rewards).any():
        raise ValueError(f"rewards have to be [P, G] and finite or NaN, got shape {rewards.shape}")
    advantages = _centre(rewards, config)
    penalized = rewards if penalty is None else rewards - np.asarray(penalty, np.float64)
    shift = _centre(penalized, config) - advantages
    if config.advantage_std != "none":
        over = -1 if config.advantage_std == "group" else _EVERYTHING
        advantages = _divide(advantages, _std(rewards, over), config.std_epsilon)
    advantages = advantages + shift
    if config.whiten != "none":
        advantages = _whiten(advantages, config, num_tokens)
    if config.advantage in ("group_mean", "leave_one_out"):
        differ = spread(rewards, keepdims=True) | spread(penalized, keepdims=True)
        advantages = np.where(differ, advantages, 0.0)
    return np.where(np.isnan(rewards), 0.0, advantages)


def combine_rewards(parts: np.ndarray, weights: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    """One reward from several: the weighted sum of those that did not abstain.

    With ``reward_combine: normalized_sum`` each reward is first normalised within its group, so that
    rewards of different scale keep their say (GDPO, arXiv:2601.05242, which goes on with ``advantage_std:
    none`` and ``whiten: sequence``).

    Args:
        parts: float [P, G, F], one column for each reward function; NaN = abstained.
        weights: float [F].

    Returns:
        float64 [P, G]; NaN where all abstained.
    """
    parts = np.asarray(parts, np.float64)
    if config.reward_combine == "normalized_sum":
        normalized = _divide(parts - _mean(parts, 1), _std(parts, 1), config.std_epsilon)
        parts = np.where(spread(parts, 1, keepdims=True) | np.isnan(parts), normalized, 0.0)
    total = np.nansum(parts * np.asarray(weights, np.float64), axis=-1)
    return np.where(np.isnan(parts).all(axis=-1), np.nan, total)


def overlong_penalty(lengths: np.ndarray, config: AdvantageConfig, max_completion_tokens: int) -> np.ndarray:
    """Reward taken off long completions: 0, linear over the buffer, then full (DAPO, arXiv:2503.14476, eq.
    13).

    Args:
        lengths: int [...], completion tokens.
        max_completion_tokens: the rollout's limit, where ``overlong_max_tokens`` does not say otherwise.

    Returns:
        float64 [...], from -overlong_penalty to 0, to be added to the rewards.

    Raises:
        ConfigError: the buffer is not shorter than the limit.
    """
    longest = config.overlong_max_tokens or max_completion_tokens
    buffer = config.overlong_buffer_tokens or max(longest // 5, 1)
    if buffer >= longest:
        raise ConfigError(
            f"{buffer} tokens given; it has to be less than the limit of {longest} tokens",
            "algo.overlong_buffer_tokens",
        )
    return config.overlong_penalty * np.clip((longest - buffer - np.asarray(lengths)) / buffer, -1.0, 0.0)


def _centre(rewards: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    """Rewards minus their baseline; NaN stays NaN."""
    if config.advantage == "none":
        return rewards
    deviation = rewards - _mean(rewards, -1)
    if config.advantage == "group_mean":
        return deviation
    if config.advantage == "leave_one_out":  # R - mean of the n - 1 others = n / (n - 1) (R - mean of all n)
        known = (~np.isnan(rewards)).sum(axis=-1, keepdims=True)
        return deviation * known / np.maximum(known - 1, 1)
    user: Callable[[np.ndarray], np.ndarray] = import_by_path(config.advantage, "algo.advantage")
    return np.asarray(user(rewards), np.float64)


def _whiten(advantages: np.ndarray, config: AdvantageConfig, num_tokens: np.ndarray | None) -> np.ndarray:
    """Mean 0 and variance 1 over sequences or their learned tokens; exactly 0 where all are equal."""
    if config.whiten == "token" and num_tokens is None:
        raise ValueError("whiten: token needs the number of learned tokens of each completion")
    weights = np.ones(advantages.shape) if config.whiten == "sequence" else np.asarray(num_tokens, np.float64)
    weights = np.where(np.isnan(advantages), 0.0, weights)
    counted = np.where(weights > 0, advantages, np.nan)
    if not spread(counted, None):
        return np.zeros_like(advantages)
    total = weights.sum()
    mean = np.nansum(weights * advantages) / total
    std = np.sqrt(np.nansum(weights * (advantages - mean) ** 2) / max(total - 1, 1))
    return _divide(advantages - mean, std, config.std_epsilon)


def _mean(values: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    known = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    return np.nansum(values, axis=axis, keepdims=True) / np.maximum(known, 1)


def _std(values: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    known = (~np.isnan(values)).sum(axis=axis, keepdims=True)
    squares = np.nansum((values - _mean(values, axis)) ** 2, axis=axis, keepdims=True)
    return np.sqrt(squares / np.maximum(known - 1, 1))


def _divide(values: np.ndarray, std: np.ndarray, epsilon: float) -> np.ndarray:
    scale = std + epsilon
    return values / np.where(scale > 0, scale, 1.0)
