"""Rewards of sampled completions: the process pool's functions and the reward models on device, joined.

Only the first process calls functions; the others are told the result.
"""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh

from jaxrl import distributed
from jaxrl.batch import Rollouts
from jaxrl.rewards.config import RewardsConfig
from jaxrl.rewards.pool import RewardPool, Scores


class Scorer:
    """Scores rollouts with every term of ``config``. Close it: it owns processes."""

    def __init__(self, config: RewardsConfig, mesh: Mesh):
        self._models = {term.title: load_reward_model(term, mesh) for term in config.model_terms}
        self._pool = RewardPool(config) if distributed.is_first() else None

    def score(self, rollouts: Rollouts) -> Scores:
        """Rewards of B completions; equal on every process."""
        group = rollouts.group_size
        prompts = [text for text in rollouts.prompts.texts for _ in range(group)]
        columns: dict[str, list] = {}
        for name in dict.fromkeys(k for example in rollouts.prompts.examples for k in example):
            columns[name] = [e.get(name) for e in rollouts.prompts.examples for _ in range(group)]
        given = {title: model.score(rollouts) for title, model in self._models.items()}
        told = None
        if self._pool is not None:
            scores = self._pool.score(prompts, rollouts.texts, list(rollouts.tokens), columns, given=given)
            told = [
                scores.rewards.tolist(),
                {k: v.tolist() for k, v in scores.parts.items()},
                scores.errors,
                scores.answers,
            ]
        rewards, parts, errors, answers = distributed.broadcast(told)
        return Scores(np.array(rewards), {k: np.array(v) for k, v in parts.items()}, errors, answers)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def load_reward_model(term, mesh: Mesh):
    from jaxrl.rewards.model import RewardModel

    return RewardModel(term, mesh)
