"""Supervised losses: of the tokens that the data holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import jax

from jaxrl.config import setting
from jaxrl.learn.losses.loss import Loss, Statistics, Terms, name_problems, objective, weighted_sum
from jaxrl.learn.metrics import Metrics, mean_of
from jaxrl.types import TrainBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftLossConfig:
    """Settings of the supervised loss."""

    objective: str = setting(
        "nll",
        "loss of one token: nll (negative log-likelihood), or the import path of f(terms, config) -> loss of "
        "each token [R, T]",
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus (loss per nat)")

    def loss_problems(self) -> Iterator[tuple[str, str]]:
        """Settings that cannot work, as (key, message)."""
        yield from name_problems("objective", self.objective, OBJECTIVES)


def nll(terms: Terms, config: SftLossConfig) -> jax.Array:
    """-log p."""
    return -terms.log_probs


OBJECTIVES: Mapping[str, Callable[[Terms, SftLossConfig], jax.Array]] = {"nll": nll}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SftLoss(Loss):
    """Loss of the learned tokens of given rows."""

    config: SftLossConfig

    @property
    def unit(self) -> Literal["token", "sample"]:
        return "token" if self.config.objective in OBJECTIVES else "sample"

    def __call__(self, statistics: Statistics, micro: TrainBatch) -> tuple[jax.Array, Metrics]:
        terms, config = Terms.of(statistics, micro), self.config
        per_token = {"loss/policy": terms.mask * objective(config.objective, OBJECTIVES)(terms, config)}
        if config.entropy_coef:
            per_token["loss/entropy"] = -config.entropy_coef * terms.entropies
        total, metrics = weighted_sum(per_token, micro)
        return total, metrics | jax.lax.stop_gradient({"algo/entropy": mean_of(terms.entropies, terms.mask)})
