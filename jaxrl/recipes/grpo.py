"""GRPO and its relatives: sampled completions, weighed by how they compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np

from jaxrl.config import ConfigError, import_by_path, setting
from jaxrl.host.agreement import checksum_of
from jaxrl.host.preemption import check
from jaxrl.learn.losses.kl import estimate
from jaxrl.learn.losses.loss import Aggregation, loss_weights
from jaxrl.learn.losses.policy import PolicyLoss, PolicyLossConfig
from jaxrl.learn.packing import Sequence
from jaxrl.recipes import advantages as adv
from jaxrl.recipes.advantages import AdvantageConfig
from jaxrl.recipes.collect import Collected, collect, sequences_of
from jaxrl.recipes.context import Context
from jaxrl.recipes.filters import keep_groups
from jaxrl.recipes.presets import PRESETS
from jaxrl.recipes.recipe import Recipe
from jaxrl.recipes.updates import by_sample, num_tokens, update, with_log_probs
from jaxrl.rewards.config import RewardTerm
from jaxrl.rewards.pool import Scores
from jaxrl.types import Rollouts, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grpo(Recipe, PolicyLossConfig, AdvantageConfig, Aggregation):
    """Reinforcement learning from the rewards of sampled completions."""

    trains_on = "rollouts"

    mask_truncated: bool = setting(False, "leave completions that hit the token limit out of the loss")
    dynamic_sampling: bool = setting(False, "replace groups whose raw task rewards are all equal by others")
    dynamic_sampling_rounds: int = setting(
        4, "at most this many extra rounds of sampling a step; 0: only drop"
    )
    num_minibatches: int = setting(1, "parameter updates that one pass over a step's rollouts is split into")
    epochs: int = setting(1, "passes over a step's rollouts")

    @classmethod
    def presets(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that the name among the given keys stands for.

        Raises:
            ConfigError: unknown name, or an import path that gives no dictionary of our keys.
        """
        name = str(given.get("name", "grpo"))
        if name in PRESETS:
            return dict(PRESETS[name])
        preset = import_by_path(name, "name")
        if isinstance(preset, type):  # a recipe that refines this one
            return {}
        keys = {field.name for field in dataclasses.fields(cls)} - {"name"}
        if unknown := sorted(set(preset) - keys):
            names = ", ".join(map(repr, unknown))
            raise ConfigError(f"{name!r} holds {names}, which are not keys of grpo", "name")
        return dict(preset)

    @property
    def loss(self) -> PolicyLoss:
        return PolicyLoss(config=self, off_policy=self.updates_per_step > 1)

    @property
    def minibatches(self) -> int:
        return self.num_minibatches

    @property
    def updates_per_step(self) -> int:
        return self.num_minibatches * self.epochs

    @property
    def forwards(self) -> dict[str, Literal["policy", "reference"]]:
        """For a single update the old policy is the policy itself, and the ratio exactly 1; a KL penalty in
        the reward needs its log-probs all the same."""
        found: dict[str, Literal["policy", "reference"]] = {}
        if self.updates_per_step > 1 or (self.kl_coef and self.kl_in == "reward"):
            found["old_log_probs"] = "policy"
        if self.kl_coef:
            found["ref_log_probs"] = "reference"
        return found

    @property
    def extra_rounds(self) -> int:
        return self.dynamic_sampling_rounds if self.dynamic_sampling else 0

    @property
    def minimum_group_size(self) -> int:
        return 2 if self.advantage in ("group_mean", "leave_one_out") or self.dynamic_sampling else 1

    def step(
        self, context: Context, state: TrainState, step: int
    ) -> tuple[TrainState, dict[str, float]] | None:
        """Prompts -> rollouts -> rewards -> log-probs -> advantages -> updates."""
        longest = context.rollout.max_new_tokens
        collected = collect(
            context,
            step,
            rewards=partial(self.rewards, terms=context.rewards.terms, longest_tokens=longest),
            keep=keep_groups if self.dynamic_sampling else None,
            extra_rounds=self.extra_rounds,
        )
        if collected is None:
            return None
        params = {"policy": state.params, "reference": context.ref_params}
        sources = {column: params[role] for column, role in self.forwards.items()}
        sequences = with_log_probs(context, sequences_of(collected.rollouts), sources, self.num_minibatches)
        sequences, metrics = self.with_advantages(collected, sequences, longest_tokens=longest)
        sampled = len(collected.rollouts), int(collected.rollouts.sampled_lengths.sum())
        check(context.stop, *sampled, what=f"the batch of step {step}", value=checksum_of(sequences))
        state, found = update(
            context,
            state,
            sequences,
            step,
            partial(loss_weights, config=self, longest_tokens=longest),
            minibatches=self.num_minibatches,
            epochs=self.epochs,
        )
        return state, collected.metrics | metrics | found

    def rewards(
        self, rollouts: Rollouts, scores: Scores, *, terms: Iterable[RewardTerm], longest_tokens: int
    ) -> np.ndarray:
        """[B] what is trained on: the terms combined, less the penalty on length; NaN = abstained."""
        shape = (-1, rollouts.group_size)
        weights = {term.title: term.weight for term in terms}
        parts = np.stack([scores.parts[name].reshape(shape) for name in scores.parts], axis=-1)
        rewards = adv.combine_rewards(parts, np.array([weights[name] for name in scores.parts]), self)
        return rewards.reshape(-1) + adv.overlong_penalty(rollouts.lengths, self, longest_tokens)

    def with_advantages(
        self, collected: Collected, sequences: list[Sequence], *, longest_tokens: int
    ) -> tuple[list[Sequence], dict[str, float]]:
        """The sequences with advantages; masks completions that the settings leave out."""
        if not sequences:
            return sequences, {}
        rollouts, rewards = collected.rollouts, collected.scores.rewards
        metrics = {}
        # A sample that nobody judged teaches nothing: it leaves the loss, and the averages over tokens.
        drop = np.isnan(rewards)
        if self.overlong_penalty and not drop.all():
            penalty = adv.overlong_penalty(rollouts.lengths, self, longest_tokens)
            metrics["reward/overlong_penalty"] = float(penalty[~drop].mean())
        if self.mask_truncated:
            drop = drop | rollouts.truncated
        samples, shape = by_sample(sequences), (-1, rollouts.group_size)
        learned = np.where(drop, 0, num_tokens(samples)).reshape(shape)
        kl_penalty = None
        if self.kl_coef and self.kl_in == "reward":
            kl = np.array([sum(self._kl(s) for s in rows) for rows in samples]).reshape(shape)
            kl_penalty = self.kl_coef * kl
            if learned.any():
                metrics["algo/kl"] = float(kl[learned > 0].sum() / learned.sum())
        values = adv.compute(rewards.reshape(shape), self, penalty=kl_penalty, num_tokens=learned).reshape(-1)
        metrics["algo/masked_fraction"] = float(drop.mean())
        metrics["algo/advantage_abs_mean"] = float(np.abs(values).mean())
        found = []
        for rows, value, dropped in zip(samples, values, drop, strict=True):
            for s in rows:
                mask = s.loss_mask * (0.0 if dropped else 1.0)
                columns = {**s.columns, "advantages": np.float32(value) * mask}
                found.append(dataclasses.replace(s, loss_mask=mask, columns=columns))
        return found, metrics

    def _kl(self, s: Sequence) -> float:
        """KL of a sequence to the reference (nats)."""
        old, ref = s.columns["old_log_probs"], s.columns["ref_log_probs"]
        return float((np.asarray(estimate(old, ref, self.kl_estimator)) * s.loss_mask).sum())

    def shrunk(self, new_tokens: int) -> Grpo:
        return dataclasses.replace(
            self,
            dynamic_sampling=False,
            overlong_max_tokens=self.overlong_max_tokens and new_tokens,
            overlong_buffer_tokens=self.overlong_buffer_tokens and min(self.overlong_buffer_tokens, 4),
        )

    def warnings(self) -> Iterator[str]:
        if self.objective == "reinforce" and self.updates_per_step > 1:
            yield (
                f"algo.objective reinforce has no ratio, but a rollout gets {self.updates_per_step} updates "
                "(algo.num_minibatches x algo.epochs): from the second on its samples are of an older "
                "policy, uncorrected"
            )

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        yield from self.loss_problems()
        yield from self.advantage_problems()
        yield from self.aggregation_problems()
        least = {"num_minibatches": 1, "epochs": 1, "dynamic_sampling_rounds": 0}
        for key, smallest in least.items():
            if getattr(self, key) < smallest:
                yield key, f"{getattr(self, key)} given; it must be at least {smallest}"
        if self.ratio_level == "sequence_sum" and self.aggregation != "sequence_mean":
            yield (
                "aggregation",
                f"ratio_level: sequence_sum makes one loss for each sequence, which {self.aggregation} would "
                "weigh by its length once more; use sequence_mean",
            )

    def dead_keys(self) -> Iterator[tuple[str, str]]:
        yield from self.loss_dead_keys(off_policy=self.updates_per_step > 1)
        yield from self.advantage_dead_keys()
        yield from self.aggregation_dead_keys()
        if not self.dynamic_sampling:
            yield "dynamic_sampling_rounds", "dynamic_sampling is off"
