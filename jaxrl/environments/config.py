"""Settings of episodes: which environment, and the limits of turns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from jaxrl.config import ConfigError, factory, setting
from jaxrl.environments import calls
from jaxrl.workers.config import PoolConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Section ``environment``: what answers the policy between its turns. An episode is one completion of
    several turns: ``rollout.max_new_tokens`` limits all of it, observations included."""

    name: str | None = setting(
        None,
        "a built-in (calculator), or your class: package.module:name or file.py:name; null: completions have "
        "one turn",
    )
    args: dict[str, Any] = factory(dict, "keyword arguments it is made with")
    turns: int = setting(4, "most turns of the policy in an episode; one that would need more is truncated")
    turn_tokens: int | None = setting(
        None,
        "limit of one turn (tokens); a turn that reaches it ends the episode as truncated. null: as much as "
        "rollout.max_new_tokens leaves",
    )
    observation_tokens: int = setting(
        256, "most tokens of a message of the environment, which is cut before the chat template wraps it"
    )
    workers: int = setting(
        2, "processes that run the steps; 0: in the training process, without a time limit (quick tests)"
    )
    timeout_seconds: float = setting(
        10.0,
        "time limit of one step (reset included); a worker that exceeds it is killed and replaced. What a "
        "failed episode costs is said by rewards.on_error",
    )
    pool: PoolConfig = factory(PoolConfig, "where the workers run")

    @property
    def rows(self) -> int:
        """Most rows that an episode can become: a chat template may rewrite the history at every turn."""
        return self.turns if self.name else 1

    def problems(self) -> Iterable[tuple[str, str]]:
        """Raises UserCodeError when importing a user's environment raises."""
        for key in ("turns", "turn_tokens", "observation_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                yield key, f"{value}: needs at least 1"
        if self.workers < 0:
            yield "workers", f"{self.workers}: needs 0 (within the process) or a number of processes"
        if not 0 < self.timeout_seconds < math.inf:
            yield "timeout_seconds", f"{self.timeout_seconds}: needs a positive number of seconds"
        if self.name is not None:
            try:
                calls.load(self.name, self.args)
            except ConfigError as error:
                yield from error.problems
