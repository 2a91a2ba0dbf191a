"""A loss as a value: what it reads, what it is a loss of, and a function of the tokens' terms.

    loss = sum over learned tokens of  loss_weight * loss of the token

The weights are computed once for a whole update (``loss_weights``), so that micro-batches and devices add up
exactly. A new loss is a subclass of ``Loss``; CONTRIBUTING.md has a complete example.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import import_by_path, nearest, setting
from jaxrl.learn.metrics import Metrics
from jaxrl.types import Column, Metric, TrainBatch

LOG_PROB_FLOOR = -1e4
"""Log-probs below (-inf included) count as this, so that differences of them stay finite."""


class Statistics(NamedTuple):
    """Statistics of tokens, float32 [M, R, T] (one micro-batch: [R, T]); 0 where nothing is learned."""

    log_probs: jax.Array
    """Nats, of logits / temperature."""
    entropies: jax.Array


class Numbers(NamedTuple):
    """Outputs of a head of one number (a value, a reward) for each token of a batch."""

    numbers: jax.Array
    """float32 [M, R, T] (one micro-batch: [R, T]); also at tokens that are not learned."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss(abc.ABC):
    """Static and hashable: programs are compiled for it."""

    head: ClassVar[Literal["tokens", "number"]] = "tokens"
    """Output of the model's head for each token. tokens: ``Statistics`` of predicting it; number:
    ``Numbers``, made of the hidden state at the token by the parameter ``score`` [1, D]."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns that it reads besides ``loss_mask`` and ``loss_weights``.

        With ``TARGETS`` among them it is given the log-probs of those ids.
        """
        return ()

    @property
    def unit(self) -> Literal["token", "sample"]:
        """Unit of the loss. token: its derivative at a token depends on nothing of other tokens; sample:
        packing keeps a sample in one row, an episode with all its rows or a pair with both."""
        return "token"

    @abc.abstractmethod
    def __call__(self, statistics: Any, micro: TrainBatch) -> tuple[jax.Array, Metrics]:
        """Share of one micro-batch [R, T] in the update's loss (scalar, with gradient), and in its metrics;
        ``statistics`` are what the head gives.

        Values at tokens that are not learned must not matter, not even as NaN.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """Inputs of an objective, of one micro-batch: [R, T] float32, nats, 0 at tokens that are not learned."""

    log_probs: jax.Array
    """Log-probs of the policy, with gradient."""
    entropies: jax.Array
    """Entropies of the policy, with gradient."""
    mask: jax.Array
    """1 at learned tokens."""
    sample_ids: jax.Array
    """int32; 1, 2, ... number the samples of a row: sequences, or episodes with all their rows."""
    columns: Mapping[str, jax.Array]
    """Columns that the loss declares, by name."""

    @classmethod
    def of(cls, statistics: Statistics, micro: TrainBatch) -> Terms:
        """The terms with everything that is not learned set to 0."""
        learned = micro.loss_mask > 0

        def clean(values: jax.Array) -> jax.Array:
            return jnp.where(learned, values, 0)

        return Terms(
            log_probs=floored(clean(statistics.log_probs)),
            entropies=clean(statistics.entropies).astype(jnp.float32),
            mask=learned.astype(jnp.float32),
            sample_ids=micro.segment_ids if micro.sample_ids is None else micro.sample_ids,
            columns={name: clean(values) for name, values in micro.columns.items()},
        )

    def sequence_sum(self, values: jax.Array) -> jax.Array:
        """Sum of values [R, T] over the learned tokens of a sample, at each of its tokens."""
        return _sequence_sum(values * self.mask, self.sample_ids)

    def sequence_mean(self, values: jax.Array) -> jax.Array:
        """Mean of values [R, T] over the learned tokens of a sample, at each of its tokens."""
        return self.sequence_sum(values) / jnp.maximum(_sequence_sum(self.mask, self.sample_ids), 1.0)


def floored(log_probs: jax.Array) -> jax.Array:
    """float32, at least ``LOG_PROB_FLOOR``."""
    return jnp.maximum(log_probs.astype(jnp.float32), LOG_PROB_FLOOR)


def weighted_sum(per_token: Mapping[str, jax.Array], micro: TrainBatch) -> tuple[jax.Array, Metrics]:
    """Sum of losses [R, T], each weighted by ``loss_weights``; each one, and ``loss/total``, as a metric."""
    weights = jnp.where(micro.loss_mask > 0, micro.loss_weights, 0.0)
    losses = {name: jnp.sum(weights * values) for name, values in per_token.items()}
    total = losses["loss/total"] = sum(losses.values(), start=jnp.float32(0))
    shares = {name: Metric(total=value, reduction="sum") for name, value in losses.items()}
    return total, jax.lax.stop_gradient(shares)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aggregation:
    """Settings of the average over tokens."""

    aggregation: Literal["token_mean", "sequence_mean", "constant"] = setting(
        "token_mean",
        "mean over all tokens of the update; mean over sequences of their token means; or sum over tokens, "
        "divided by the number of sequences x a constant length",
    )
    constant_length_tokens: int | None = setting(
        None,
        "aggregation constant: that length (tokens); null: the limit of a completion, or of a row of data; "
        "1: plain sum over tokens",
    )
    empty_sequences: Literal["count", "skip"] = setting(
        "count", "whether sequences without a learned token count in the number of sequences that divides"
    )

    def aggregation_problems(self) -> Iterator[tuple[str, str]]:
        """Settings that cannot work, as (key, message)."""
        length = self.constant_length_tokens
        if length is not None and length < 1:
            yield "constant_length_tokens", f"{length} given; it must be at least 1"

    def aggregation_dead_keys(self) -> Iterator[tuple[str, str]]:
        """Keys that have no effect, each with the reason."""
        if self.aggregation != "constant":
            yield "constant_length_tokens", f"aggregation is {self.aggregation}"
        if self.aggregation == "token_mean":
            yield "empty_sequences", "a mean over tokens counts no sequences"


def loss_weights(num_tokens: np.ndarray, config: Aggregation, *, longest_tokens: int) -> np.ndarray:
    """Weight of each learned token of each sequence, for one whole update (all micro-batches, all devices).

    A token's weight is that of its sequence times its loss_mask. token_mean: 1 / all tokens; sequence_mean:
    1 / (B n_i); constant: 1 / (B Lmax). B counts every sequence, or those with a learned token
    (``empty_sequences``).

    Args:
        num_tokens: int [B] learned tokens (ones of the loss_mask) of each sequence in the update.
        longest_tokens: the Lmax where ``constant_length_tokens`` is null.

    Returns:
        float32 [B]; 0 for sequences that are not trained on, all 0 when there is none.
    """
    learned = np.asarray(num_tokens, np.float64)
    sequences = np.count_nonzero(learned) if config.empty_sequences == "skip" else len(learned)
    if config.aggregation == "token_mean":
        divisor = np.full_like(learned, learned.sum())
    elif config.aggregation == "sequence_mean":
        divisor = sequences * learned
    else:
        divisor = np.full_like(learned, sequences * (config.constant_length_tokens or longest_tokens))
    return np.where(learned > 0, 1.0 / np.maximum(divisor, 1.0), 0.0).astype(np.float32)


def objective(name: str, known: Mapping[str, Callable]) -> Callable[..., jax.Array]:
    """The loss of one token that ``algo.objective`` names: built in, or the user's own by import path.

    Raises:
        ConfigError: the import path leads nowhere.
    """
    return known.get(name) or import_by_path(name, "algo.objective")


def name_problems(key: str, name: str, known: Collection[str]) -> Iterator[tuple[str, str]]:
    """(key, message) when ``name`` is neither built in nor an import path."""
    if name not in known and ":" not in name:
        hint = f"; did you mean {close!r}?" if (close := nearest(name, known)) else ""
        yield key, f"{name!r} given{hint}; expected one of {', '.join(known)}, or an import path"


def _sequence_sum(values: jax.Array, sample_ids: jax.Array) -> jax.Array:
    """[R, T] sum over each sample of a row, at each of its tokens. T tokens hold at most T samples."""

    def row(values: jax.Array, samples: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values, samples, num_segments=values.shape[0] + 1)[samples]

    return jax.vmap(row)(values, sample_ids)
