"""Metrics of micro-batches and updates, put together as each says (see ``types.Metric``)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxrl.types import Metric

Metrics = dict[str, Metric]


def mean_of(values: jax.Array, weights: jax.Array) -> Metric:
    """Weighted mean of equally shaped arrays."""
    return Metric(total=jnp.sum(weights * values), weight=jnp.sum(weights), reduction="mean")


def largest_of(values: jax.Array, mask: jax.Array) -> Metric:
    """Largest of the values where ``mask`` is 1, at least 0."""
    return Metric(total=jnp.max(mask * values), reduction="max")


def merge(a: Metrics, b: Metrics) -> Metrics:
    """Metrics of two micro-batches together (same names)."""

    def both(x: Metric, y: Metric) -> Metric:
        add = jnp.maximum if x.reduction == "max" else jnp.add
        return jax.tree.map(add, x, y)

    return {name: both(metric, b[name]) for name, metric in a.items()}


def of_update(metrics: Metrics) -> Metrics:
    """Metrics of all micro-batches as those of one update: a sum over them is a number of the update, and of
    several updates the mean counts."""
    return {
        name: mean_of(m.total, jnp.ones_like(m.total)) if m.reduction == "sum" else m
        for name, m in metrics.items()
    }


def finish(*updates: Metrics) -> dict[str, float]:
    """Plain numbers for the log, over one update or several; a mean over nothing is left out."""
    result = {}
    for name in dict.fromkeys(name for metrics in updates for name in metrics):
        found = [metrics[name] for metrics in updates if name in metrics]
        totals = [float(metric.total) for metric in found]
        if found[0].reduction == "max":
            result[name] = max(totals)
        elif found[0].reduction == "sum":
            result[name] = math.fsum(totals)
        elif (weight := math.fsum(float(metric.weight) for metric in found)) > 0:
            result[name] = math.fsum(totals) / weight
    return result
