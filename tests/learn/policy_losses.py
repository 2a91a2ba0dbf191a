"""Losses called without a model: log-probs in, value and metrics out."""

import dataclasses

from jaxrl.learn.losses.loss import Statistics
from jaxrl.learn.losses.policy import PolicyLoss
from jaxrl.recipes.sft import Sft
from jaxrl.types import TrainBatch

COLUMNS = ("advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs")


def policy_loss(log_probs, entropies, batch, config):
    """(value, metrics) of a micro-batch under the recipe ``config``; without old log-probs the update is the
    first one of its rollouts."""
    if isinstance(config, Sft):
        loss = config.loss
    else:
        loss = PolicyLoss(config=config, off_policy="old_log_probs" in batch.columns)
    return loss(Statistics(log_probs, entropies), batch)


def batch_of(**arrays):
    """A ``TrainBatch`` whose columns stand among its fields; None: the batch lacks the column."""
    columns = {name: arrays.pop(name) for name in COLUMNS if name in arrays}
    return TrainBatch(columns={n: v for n, v in columns.items() if v is not None}, **arrays)


def changed(batch, **columns):
    """The batch with other columns; None: without it."""
    columns = {**batch.columns, **columns}
    return dataclasses.replace(batch, columns={n: v for n, v in columns.items() if v is not None})
