"""A recipe: a kind of training with settings of its own, the section ``algo``."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from jaxrl.config import setting
from jaxrl.learn.losses.loss import Loss
from jaxrl.recipes.context import Context
from jaxrl.types import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(abc.ABC):
    """A kind of training. A subclass adds its own settings, and says what one step does."""

    name: str = setting(
        "grpo",
        "which recipe: grpo, one of its presets (dr_grpo, dapo, gspo, ...), sft, or an import path: of a "
        "dict of grpo's keys, or of a Recipe",
    )
    router_loss_coef: float = setting(
        0.0,
        "mixture of experts: weight of the load-balancing loss, as router_aux_loss_coef of transformers; 0: "
        "neither it nor its metrics (moe/...) are computed",
    )
    max_consecutive_skipped: int = setting(
        10, "updates skipped in a row (gradient not finite) that end the run"
    )

    FORMER_NAME: ClassVar[str] = "AlgoConfig"
    """In gin."""
    trains_on: ClassVar[Literal["rollouts", "rows"]]
    """rollouts: of prompts, ``rollout.group_size`` each, judged by ``rewards``; rows: of the data, with
    completions."""

    @property
    @abc.abstractmethod
    def loss(self) -> Loss:
        """Loss of the policy."""

    @abc.abstractmethod
    def step(
        self, context: Context, state: TrainState, step: int
    ) -> tuple[TrainState, dict[str, float]] | None:
        """One step: gather what to learn from, and update. ``state`` is donated to the first update.

        Returns:
            The new state, and numbers to log; None when the data has ended.
        """

    @property
    def minibatches(self) -> int:
        """Updates that one pass over a step's samples is split into."""
        return 1

    @property
    def updates_per_step(self) -> int:
        return self.minibatches

    @property
    def forwards(self) -> dict[str, Literal["policy", "reference"]]:
        """Columns of log-probs that forward passes before the updates fill: whose log-probs each has."""
        return {}

    @property
    def uses_reference(self) -> bool:
        """True when a frozen reference is loaded."""
        return "reference" in self.forwards.values()

    @property
    def minimum_group_size(self) -> int:
        """Completions of a prompt that the recipe needs."""
        return 1

    @property
    def extra_rounds(self) -> int:
        """Most rounds of sampling in a step beyond the first, each with new prompts."""
        return 0

    def shrunk(self, new_tokens: int) -> Recipe:
        """The recipe for a rehearsal with a tiny model of random weights.

        Args:
            new_tokens: the limit of its completions.
        """
        return self

    def warnings(self) -> Iterator[str]:
        """Messages about settings that work, but may not be what was meant."""
        yield from ()

    def problems(self) -> Iterator[tuple[str, str]]:
        """Settings that cannot work, as (key, message)."""
        for key, least in (("max_consecutive_skipped", 1), ("router_loss_coef", 0)):
            if getattr(self, key) < least:
                yield key, f"{getattr(self, key)} given; it must be at least {least}"

    def dead_keys(self) -> Iterator[tuple[str, str]]:
        """Keys without effect as the others are set, each with the reason: refused where they are given."""
        yield from ()
