"""Rewards of sampled completions: the process pool's functions and the reward models on device, joined.

Only the first process calls functions; the others are told the result.
"""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh

from jaxrl.data.config import DataConfig
from jaxrl.host import distributed
from jaxrl.rewards.config import RewardsConfig
from jaxrl.rewards.model import RewardModel
from jaxrl.rewards.pool import RewardPool, Scores
from jaxrl.types import Rollouts


class Scorer:
    """Scores rollouts with every term of ``rewards``. Close it: it owns processes."""

    def __init__(self, rewards: RewardsConfig, data: DataConfig, mesh: Mesh):
        self._config = rewards
        self._models = {}
        for number, term in enumerate(rewards.terms):
            if term.is_model:
                key = f"rewards.terms.{number}"
                self._models[term.title] = RewardModel(term.args, data, mesh, key)
        self._pool = RewardPool(rewards) if distributed.is_first() else None

    def score(self, rollouts: Rollouts) -> Scores:
        """Rewards of B completions; equal on every process."""
        group = rollouts.group_size
        examples = [example for example in rollouts.prompts.examples for _ in range(group)]
        names = dict.fromkeys(name for example in rollouts.prompts.examples for name in example)
        given = {title: model.score(rollouts) for title, model in self._models.items()}
        failed = {i: e.failure for i, e in enumerate(rollouts.episodes) if e.failure}
        for term in self._config.terms:
            if term.is_environment:
                given[term.title] = np.array([episode.reward for episode in rollouts.episodes])
        told = None
        if self._pool is not None:
            scores = self._pool.score(
                [text for text in rollouts.prompts.texts for _ in range(group)],
                rollouts.texts,
                [sample.sampled for sample in rollouts.samples],
                {name: [example.get(name) for example in examples] for name in names},
                given=given,
                failed=failed,
            )
            parts = {name: part.tolist() for name, part in scores.parts.items()}
            answers = scores.answers
            if any(t.is_environment and t.title == self._config.task for t in self._config.terms):
                answers = [text.strip() or None for text in rollouts.texts]
            told = [scores.rewards.tolist(), parts, scores.errors, answers]
        rewards, parts, errors, answers = distributed.broadcast(told)
        return Scores(np.array(rewards), {k: np.array(v) for k, v in parts.items()}, errors, answers)

    def close(self) -> None:
        """End the pool's processes."""
        if self._pool is not None:
            self._pool.close()
