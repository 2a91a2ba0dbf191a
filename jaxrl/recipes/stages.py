"""What happens between two arrows of the loop: host-side work on rollouts, rewards and batches. Called by
``train.py``."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl.data.pipeline import TrainingRows
from jaxrl.host.distributed import to_host
from jaxrl.learn.kl import estimate
from jaxrl.learn.losses import loss_weights
from jaxrl.learn.packing import PackIndex, pack, unpack
from jaxrl.learn.packing import Sequence as TrainSequence
from jaxrl.mesh.sharding import put
from jaxrl.ops.axes import BATCH_AXES
from jaxrl.recipes import advantages as adv
from jaxrl.recipes.collect import Collected
from jaxrl.run.settings import RunConfig
from jaxrl.run.setup import Programs, Setup
from jaxrl.types import TrainBatch

logger = logging.getLogger("jaxrl")


def supervised_sequences(rows: TrainingRows) -> list[TrainSequence]:
    """Rows of data as they are."""
    return [TrainSequence(tokens=t, loss_mask=m) for t, m in zip(rows.tokens, rows.loss_mask, strict=True)]


def score(
    parts: Setup, programs: Programs, params: Any, ref_params: Any, sequences: list[TrainSequence]
) -> tuple[list[TrainSequence], int]:
    """Old and reference log-probs where the algorithm needs them, and the number of tokens that were computed
    for it."""
    algo = parts.config.algo
    if not sequences or not (algo.needs_old_log_probs or algo.uses_reference):
        return sequences, 0
    sources = {"old_log_probs": params if algo.needs_old_log_probs else None, "ref_log_probs": ref_params}
    sources = {name: weights for name, weights in sources.items() if weights is not None}
    scored: list[TrainSequence] = []
    computed = 0
    samples = _by_sample(sequences)
    # In the shape of an update's batch.
    for part in _split(np.arange(len(samples)), algo.num_minibatches):
        chosen = [s for i in part for s in samples[i]]
        batch, count, index, tokens = _packed(parts, chosen)
        computed += tokens
        found = {
            name: unpack(to_host(programs.learner.forward(weights, {}, batch, count).log_probs), index)
            for name, weights in sources.items()
        }
        scored += [
            dataclasses.replace(s, **{n: v[i] for n, v in found.items()}) for i, s in enumerate(chosen)
        ]
    return scored, len(sources) * computed


def with_advantages(
    config: RunConfig, collected: Collected, sequences: list[TrainSequence]
) -> tuple[list[TrainSequence], dict[str, float]]:
    """Rewards -> advantages, written onto the sequences; masks completions that the algorithm leaves
    out."""
    algo, rollouts, scores = config.algo, collected.rollouts, collected.scores
    if not sequences:
        return sequences, {}
    shape = (-1, rollouts.group_size)
    limit = config.rollout.max_new_tokens
    names = list(scores.parts)
    weights = {term.title: term.weight for term in config.rewards.terms}
    parts = np.stack([scores.parts[n].reshape(shape) for n in names], axis=-1)
    rewards = adv.combine_rewards(parts, np.array([weights[n] for n in names]), algo)
    metrics = {}
    if algo.overlong_penalty:
        penalty = adv.overlong_penalty(rollouts.lengths, algo, limit).reshape(shape)
        rewards = rewards + penalty
        if not np.isnan(rewards).all():
            metrics["reward/overlong_penalty"] = float(penalty[~np.isnan(rewards)].mean())
    # A sample that nobody judged teaches nothing: it leaves the loss, and the averages over tokens.
    drop = np.isnan(rewards).reshape(-1)
    if algo.mask_truncated:
        drop |= rollouts.truncated
    samples = _by_sample(sequences)
    num_tokens = np.where(drop, 0, _num_tokens(samples)).reshape(shape)
    kl = None
    if algo.uses_reference and algo.kl_in == "reward":
        kl = np.array([sum(_sequence_kl(s, algo.kl_estimator) for s in rows) for rows in samples])
        kl = kl.reshape(shape)
        if num_tokens.any():
            metrics["algo/kl"] = float(kl[num_tokens > 0].sum() / num_tokens.sum())
    values = adv.compute(rewards, algo, kl=kl, num_tokens=num_tokens).reshape(-1)
    metrics["algo/masked_fraction"] = float(drop.mean())
    metrics["algo/advantage_abs_mean"] = float(np.abs(values).mean())
    found = []
    for rows, value, dropped in zip(samples, values, drop, strict=True):
        for s in rows:
            mask = s.loss_mask * (0.0 if dropped else 1.0)
            found.append(dataclasses.replace(s, loss_mask=mask, advantages=np.float32(value) * mask))
    return found, metrics


def _by_sample(sequences: list[TrainSequence]) -> list[list[TrainSequence]]:
    """The rows of each sample: one, but for episodes whose history was rewritten."""
    samples: dict[int, list[TrainSequence]] = {}
    for i, s in enumerate(sequences):
        samples.setdefault(i if s.sample is None else s.sample, []).append(s)
    return list(samples.values())


def _split(numbers: np.ndarray, parts: int) -> list[np.ndarray]:
    """``numbers`` in ``parts`` nearly equal pieces; fewer where there are fewer numbers, as none is empty."""
    return np.array_split(numbers, min(parts, len(numbers)))


def _num_tokens(samples: list[list[TrainSequence]]) -> np.ndarray:
    """[B] scored tokens of each sample, over all its rows."""
    return np.array([sum(s.loss_mask.sum() for s in rows) for rows in samples])


def minibatches(
    parts: Setup, sequences: list[TrainSequence], step: int
) -> Iterator[tuple[TrainBatch, jax.Array, int]]:
    """The packed batch of each update of this step, on device, with its number of micro-batches and of tokens
    to compute.

    Every epoch splits the samples anew, in an order that depends on (seed, step, epoch) alone. Loss weights
    are those of the whole update, and a sample's: the rows of an episode stay together and weigh as one.
    """
    config, algo = parts.config, parts.config.algo
    samples = _by_sample(sequences)
    for epoch in range(algo.epochs if sequences else 0):
        order = np.arange(len(samples))
        if algo.num_minibatches > 1:
            order = np.random.default_rng((config.seed, step, epoch)).permutation(order)
        for chosen in _split(order, algo.num_minibatches):
            own = [samples[i] for i in chosen]
            weights = loss_weights(
                _num_tokens(own), algo, max_completion_tokens=config.rollout.max_new_tokens
            )
            part = [
                dataclasses.replace(s, loss_weights=w * s.loss_mask)
                for rows, w in zip(own, weights, strict=True)
                for s in rows
            ]
            batch, count, _, tokens = _packed(parts, part)
            yield batch, count, tokens


def _packed(parts: Setup, sequences: list[TrainSequence]) -> tuple[TrainBatch, jax.Array, PackIndex, int]:
    """Packed and on device: batch [M, R, T], number of real micro-batches, where each sequence lies, and the
    tokens that are computed: a prompt once in each row that shares it."""
    batch, count, index = pack(sequences, parts.batch_shape)
    tokens = int(np.count_nonzero(batch.segment_ids))
    batch = put(batch, parts.mesh, PartitionSpec(None, BATCH_AXES))
    return batch, put(np.int32(count), parts.mesh), index, tokens


def _sequence_kl(s: TrainSequence, estimator: str) -> float:
    kl = np.asarray(estimate(s.old_log_probs, s.ref_log_probs, estimator))
    return float((kl * s.loss_mask).sum())
