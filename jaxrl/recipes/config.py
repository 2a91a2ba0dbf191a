"""The GRPO family as orthogonal choices: ratio, its bounds, baseline, average, penalties.

``algo.name`` picks a preset (see ``presets.py``), a dictionary of these same keys; keys given by the user
win over it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jaxrl.config import ConfigError, import_by_path, nearest, setting

OBJECTIVE_NAMES = ("clip", "cispo", "reinforce", "nll")
ADVANTAGE_NAMES = ("group_mean", "leave_one_out", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgoConfig:
    """How rewards become a gradient. The defaults are today's consensus recipe, the preset ``grpo``."""

    name: str = setting(
        "grpo", "preset that sets the other defaults: a built-in, or the import path of a dict"
    )

    # The policy loss of one token.
    objective: str = setting(
        "clip",
        "policy loss: clip (PPO's pessimistic bound), cispo (bounded weight without gradient), reinforce (no "
        "ratio), nll (supervised), or the import path of f(terms, config) -> loss of each token [R, T]",
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

    # The advantage of one sequence.
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
        "none", "bring advantages to mean 0 and variance 1 over all sequences, or over all scored tokens"
    )
    reward_combine: Literal["sum", "normalized_sum"] = setting(
        "sum", "several rewards: weighted sum, or each one normalised in its group before that sum (GDPO)"
    )

    # The average over tokens.
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = setting(
        "token_mean",
        "mean over all tokens of the update; mean over sequences of their token means; or sum over tokens, "
        "divided by the number of sequences x a constant length",
    )
    constant_length_tokens: int | None = setting(
        None,
        "aggregation constant: that length (tokens); null: the rollout's limit; 1: plain sum over tokens",
    )
    empty_sequences: Literal["count", "skip"] = setting(
        "count", "whether sequences without a scored token count in the number of sequences that divides"
    )

    # Regularisation.
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
    router_loss_coef: float = setting(
        0.0,
        "mixture of experts: weight of the load-balancing loss, as router_aux_loss_coef of transformers; 0: "
        "neither it nor its metrics (moe/...) are computed",
    )

    # Difference between sampler and trainer.
    sampler_correction: Literal["none", "truncate", "mask"] = setting(
        "truncate", "weight by old / rollout probability: not, clamped to the bounds, or 0 outside the bounds"
    )
    sampler_level: Literal["token", "sequence"] = setting("token", "that weight is of each token or sequence")
    sampler_min: float = setting(0.0, "lower bound of the weight")
    sampler_max: float = setting(2.0, "upper bound of the weight")

    # Length, and which groups are worth a gradient.
    mask_truncated: bool = setting(False, "leave completions that hit the token limit out of the loss")
    overlong_penalty: float = setting(0.0, "largest reward taken off too long completions; 0: off")
    overlong_max_tokens: int | None = setting(
        None, "completion length with the full penalty (tokens); null: the rollout's limit"
    )
    overlong_buffer_tokens: int | None = setting(
        None, "the penalty grows linearly over this many tokens before it; null: a fifth of it, as in DAPO"
    )
    dynamic_sampling: bool = setting(False, "replace groups whose raw task rewards are all equal by others")
    dynamic_sampling_rounds: int = setting(
        4, "at most this many extra rounds of sampling a step; 0: only drop"
    )

    # Updates.
    num_minibatches: int = setting(1, "parameter updates that one pass over a step's rollouts is split into")
    epochs: int = setting(1, "passes over a step's rollouts")
    max_consecutive_skipped: int = setting(
        10, "updates skipped in a row (gradient not finite) that end the run"
    )

    @classmethod
    def presets(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that the name among the given keys stands for.

        Raises:
            ConfigError: unknown name, or an import path that gives no dictionary of our keys.
        """
        from jaxrl.recipes.presets import PRESETS

        name = str(given.get("name", "grpo"))
        if name in PRESETS:
            return dict(PRESETS[name])
        if ":" not in name:
            hint = f"; did you mean {close!r}?" if (close := nearest(name, PRESETS)) else ""
            choices = f"one of {', '.join(PRESETS)}, or the import path of a dict"
            raise ConfigError(f"{name!r} is no preset{hint}; needed is {choices}", "name")
        preset = import_by_path(name, "name")
        keys = {field.name for field in dataclasses.fields(cls)} - {"name"}
        if not isinstance(preset, Mapping):
            raise ConfigError(f"{name!r} is a {type(preset).__name__}; needed is a dict of algo keys", "name")
        if unknown := sorted(set(preset) - keys):
            raise ConfigError(
                f"{name!r} holds {', '.join(map(repr, unknown))}, which are no algo keys", "name"
            )
        return dict(preset)

    @property
    def supervised(self) -> bool:
        """Targets come from data: no rollouts, rewards, advantages or old log-probs."""
        return self.objective == "nll"

    @property
    def updates_per_rollout(self) -> int:
        """Parameter updates made from the rollouts of one step."""
        return self.num_minibatches * self.epochs

    @property
    def uses_reference(self) -> bool:
        """Whether reference log-probs are needed."""
        return self.kl_coef != 0 and not self.supervised

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether the policy is scored before its update. For a single update it is the old policy itself,
        and the ratio exactly 1; a KL penalty in the reward needs it all the same."""
        return self.updates_per_rollout > 1 or (self.uses_reference and self.kl_in == "reward")

    @property
    def minimum_group_size(self) -> int:
        """Completions a prompt needs for the advantage to carry a signal."""
        compares = self.advantage in ("group_mean", "leave_one_out") or self.dynamic_sampling
        return 2 if compares and not self.supervised else 1

    def problems(self) -> Iterator[tuple[str, str]]:
        """Settings out of range, contradicting each other or giving a wrong gradient: (key, message)."""
        yield from _range_problems(self)
        yield from _combination_problems(self)


_LEAST = {
    "num_minibatches": 1,
    "epochs": 1,
    "max_consecutive_skipped": 1,
    "dynamic_sampling_rounds": 0,
    "constant_length_tokens": 1,
    "overlong_max_tokens": 2,
    "overlong_buffer_tokens": 1,
    "overlong_penalty": 0,
    "kl_coef": 0,
    "router_loss_coef": 0,
    "std_epsilon": 0,
    "clip_high": 0,
    "cispo_low": 0,
    "sampler_min": 0,
}


def _range_problems(c: AlgoConfig) -> Iterator[tuple[str, str]]:
    for key, names in (("objective", OBJECTIVE_NAMES), ("advantage", ADVANTAGE_NAMES)):
        value = getattr(c, key)
        if value not in names and ":" not in value:
            hint = f"; did you mean {close!r}?" if (close := nearest(value, names)) else ""
            yield key, f"{value!r} given{hint}; needed is one of {', '.join(names)}, or an import path"
    for key, least in _LEAST.items():
        value = getattr(c, key)
        if value is not None and not value >= least:
            yield key, f"{value} given; at least {least} is needed"
    if not 0 <= c.clip_low <= 1:
        yield "clip_low", f"{c.clip_low} given; 1 - clip_low bounds a ratio, so 0 to 1 is needed"
    if not c.cispo_low < 1 < c.cispo_high:
        yield (
            "cispo_low" if c.cispo_low >= 1 else "cispo_high",
            f"[{c.cispo_low}, {c.cispo_high}] leaves out the ratio 1 of unchanged tokens; the bounds are "
            "ratios themselves (not 1 + epsilon): cispo_low < 1 < cispo_high",
        )
    if not c.sampler_min < 1 < c.sampler_max:
        yield (
            "sampler_min" if c.sampler_min >= 1 else "sampler_max",
            f"[{c.sampler_min}, {c.sampler_max}] leaves out the weight 1 of exact agreement; needed is "
            "sampler_min < 1 < sampler_max",
        )


def _combination_problems(c: AlgoConfig) -> Iterator[tuple[str, str]]:
    if c.clip_dual is not None and not c.clip_dual > 1 + c.clip_high:
        bound = f"1 + clip_high = {1 + c.clip_high:g}"
        yield "clip_dual", f"{c.clip_dual} given; it has to lie above the ordinary upper bound {bound}"
    if c.kl_coef and c.kl_in == "loss" and c.kl_estimator == "k1" and not c.kl_unbiased:
        yield (
            "kl_estimator",
            "k1 as a loss has a gradient of mean 0 that does not depend on the reference; use k2 or k3, or "
            "kl_unbiased: true, or kl_in: reward",
        )
    if c.kl_coef and c.kl_in == "reward" and c.kl_estimator == "k3plus":
        yield (
            "kl_estimator",
            "k3plus differs from k3 in its gradient only, and a reward has none; use k1 or k3",
        )
    if c.advantage == "none" and c.advantage_std == "group":
        yield (
            "advantage_std",
            "dividing by the deviation of the group without subtracting its mean blows up groups that are "
            "almost equal; use advantage: group_mean, or advantage_std: none",
        )
    if c.whiten != "none" and c.advantage_std == "batch":
        yield (
            "advantage_std",
            f"whiten: {c.whiten} rescales the whole batch again; keep one of whiten and advantage_std: batch",
        )
    if c.ratio_level == "sequence_sum" and c.aggregation != "sequence_mean":
        yield (
            "aggregation",
            f"ratio_level: sequence_sum makes one loss for each sequence, which {c.aggregation} would weigh "
            "by its length once more; use sequence_mean",
        )
    sequence_weight = c.sampler_correction == "none" or c.sampler_level == "sequence"
    if c.ratio_level != "token" and c.objective == "clip" and not sequence_weight:
        yield (
            "sampler_level",
            f"ratio_level: {c.ratio_level} makes a sequence one action, and the weights of its tokens would "
            "multiply its gradient by their mean; use sequence, or sampler_correction: none",
        )
    if c.overlong_max_tokens is not None and (c.overlong_buffer_tokens or 0) >= c.overlong_max_tokens:
        yield (
            "overlong_buffer_tokens",
            f"{c.overlong_buffer_tokens} given; it has to be less than overlong_max_tokens = "
            f"{c.overlong_max_tokens}",
        )


_Rule = tuple[bool, tuple[str, ...], str]

_SUPERVISED_KEYS = frozenset(
    {"name", "objective", "entropy_coef", "router_loss_coef", "max_consecutive_skipped"}
    | {"aggregation", "constant_length_tokens", "empty_sequences"}
)


def dead_keys(config: AlgoConfig) -> dict[str, str]:
    """Keys that have no effect in the chosen mode: key -> reason. To be refused where the user gave them."""
    rules = _supervised_rules(config) if config.supervised else _policy_rules(config)
    rules += [
        (
            config.aggregation != "constant",
            ("constant_length_tokens",),
            f"aggregation is {config.aggregation}",
        ),
        (config.aggregation == "token_mean", ("empty_sequences",), "a mean over tokens counts no sequences"),
    ]
    return {key: reason for applies, keys, reason in rules if applies for key in keys}


def _supervised_rules(c: AlgoConfig) -> list[_Rule]:
    keys = tuple(field.name for field in dataclasses.fields(c) if field.name not in _SUPERVISED_KEYS)
    return [(True, keys, "supervised training (objective nll) has no rollouts and no rewards")]


def _policy_rules(c: AlgoConfig) -> list[_Rule]:
    clip, cispo = ("clip_low", "clip_high", "clip_dual"), ("cispo_low", "cispo_high")
    sampler = ("sampler_level", "sampler_min", "sampler_max")
    builtin, once = c.objective in OBJECTIVE_NAMES, c.updates_per_rollout == 1
    one_update = "one update per rollout (num_minibatches x epochs = 1): every ratio is exactly 1"
    divides = c.advantage_std != "none" or c.whiten != "none" or c.reward_combine == "normalized_sum"
    return [
        (once and builtin, (*clip, *cispo), one_update),
        (builtin and c.objective != "clip", clip, f"objective is {c.objective}"),
        (builtin and c.objective != "cispo", cispo, f"objective is {c.objective}"),
        (c.objective == "reinforce", ("ratio_level",), "objective reinforce uses no ratio"),
        (not divides, ("std_epsilon",), "nothing is divided by a standard deviation"),
        (c.kl_coef == 0, ("kl_in", "kl_estimator", "kl_unbiased"), "kl_coef is 0"),
        (c.kl_in == "reward", ("kl_unbiased",), "kl_in is reward"),
        (c.sampler_correction == "none", sampler, "sampler_correction is none"),
        (c.overlong_penalty == 0, ("overlong_max_tokens", "overlong_buffer_tokens"), "overlong_penalty is 0"),
        (not c.dynamic_sampling, ("dynamic_sampling_rounds",), "dynamic_sampling is off"),
    ]
