"""Supervised fine-tuning: the completions that the data holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

from jaxrl.config import setting
from jaxrl.data.pipeline import SftIterator
from jaxrl.host.agreement import checksum_of
from jaxrl.host.preemption import check
from jaxrl.learn.losses.loss import Aggregation, loss_weights
from jaxrl.learn.losses.sft import SftLoss, SftLossConfig
from jaxrl.learn.packing import Sequence
from jaxrl.recipes.context import Context
from jaxrl.recipes.recipe import Recipe
from jaxrl.recipes.updates import update
from jaxrl.types import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sft(Recipe, SftLossConfig, Aggregation):
    """Supervised fine-tuning."""

    trains_on = "rows"

    name: str = setting("sft", Recipe.__dataclass_fields__["name"].metadata["doc"])

    @property
    def loss(self) -> SftLoss:
        return SftLoss(config=self)

    def step(
        self, context: Context, state: TrainState, step: int
    ) -> tuple[TrainState, dict[str, float]] | None:
        """Rows -> batch -> update."""
        assert isinstance(context.stream, SftIterator)
        with context.timer.phase("prompts"):
            rows = next(context.stream, None)
        sequences = []
        if rows is not None:
            pairs = zip(rows.tokens, rows.loss_mask, strict=True)
            sequences = [Sequence(tokens=tokens, loss_mask=mask) for tokens, mask in pairs]
        check(context.stop, what=f"the rows of step {step}", value=checksum_of(sequences))
        if not sequences:
            return None
        longest = context.batch_shape.tokens
        weights = partial(loss_weights, config=self, longest_tokens=longest)
        return update(context, state, sequences, step, weights)

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        yield from self.loss_problems()
        yield from self.aggregation_problems()

    def dead_keys(self) -> Iterator[tuple[str, str]]:
        yield from self.aggregation_dead_keys()
