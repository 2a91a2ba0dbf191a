"""Warnings about runs that go on without learning what was meant, each given once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from jaxrl.run.settings import RunConfig

logger = logging.getLogger("jaxrl")

STEPS = 5
"""Steps in a row that make a warning."""


def warn_at_start(config: RunConfig, total_updates: int) -> None:
    """Warn of a schedule that the run is too short for, and of updates whose gradient is not the policy's."""
    optim = config.optim
    for warning in config.algo.warnings():
        logger.warning(warning)
    if optim.warmup_steps > total_updates:
        logger.warning(
            "optim.warmup_steps is %d, but the run makes %d updates: the learning rate ends at %.3g, below "
            "its peak of %.3g",
            optim.warmup_steps,
            total_updates,
            optim.learning_rate * total_updates / optim.warmup_steps,
            optim.learning_rate,
        )


class Watch:
    """Looks at the metrics of every step of one run."""

    def __init__(self, config: RunConfig):
        self._config = config
        self._in_a_row: dict[str, int] = {}

    def step(self, metrics: Mapping[str, float]) -> None:
        """Warn when something has been so for ``STEPS`` steps, for the first time in the run."""
        rollout = self._config.rollout
        if self._lasts("spread", metrics.get("algo/zero_spread_fraction") == 1):
            logger.warning(
                "in %d steps no group had task rewards that differ (reward/mean is %.3g): a group without a "
                "spread teaches nothing. Look at the samples; other prompts, more samples "
                "(rollout.group_size %d) or a finer reward give a spread",
                STEPS,
                metrics.get("reward/mean", float("nan")),
                rollout.group_size,
            )
        cut = metrics.get("rollout/truncated_fraction") == 1 and not rollout.ignore_eos
        if self._lasts("truncated", cut):
            logger.warning(
                "in %d steps every completion was cut by a limit (rollout.max_new_tokens is %d), none came "
                "to its end. Raise the limit, or look at what ends a completion of this model",
                STEPS,
                rollout.max_new_tokens,
            )

    def _lasts(self, name: str, so: bool) -> bool:
        """Return whether it has been so for ``STEPS`` steps in a row, once: then it is counted no more."""
        if self._in_a_row.get(name) == STEPS:
            return False
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if so else 0
        return self._in_a_row[name] == STEPS
