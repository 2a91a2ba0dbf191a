"""Objects that the steps of a run work with."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import optax

from jaxrl.data.config import DataConfig
from jaxrl.data.pipeline import PromptIterator, SftIterator
from jaxrl.learn.learner import Learner
from jaxrl.learn.optimizer import OptimConfig
from jaxrl.learn.packing import BatchShape
from jaxrl.record.metrics import MetricsWriter, PhaseTimer
from jaxrl.record.progress import Progress
from jaxrl.rewards.config import RewardsConfig
from jaxrl.rewards.scorer import Scorer
from jaxrl.rollout.config import RolloutConfig
from jaxrl.rollout.sampler import Sampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The same from step to step."""

    seed: int
    data: DataConfig
    rollout: RolloutConfig
    rewards: RewardsConfig
    optim: OptimConfig
    stream: PromptIterator | SftIterator
    """Prompts, or rows with completions: what the recipe trains on."""
    learner: Learner
    schedule: optax.Schedule
    """Number of updates made so far -> learning rate of the next."""
    batch_shape: BatchShape
    ref_params: Any
    """Frozen reference, train view; None when the recipe uses none."""
    sampler: Sampler | None
    """None when the run samples nothing."""
    scorer: Scorer
    writer: MetricsWriter
    progress: Progress
    timer: PhaseTimer
    stop: threading.Event
    """Set when the run is to save and end at its next safe point."""
