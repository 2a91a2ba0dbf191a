"""Which groups carry a signal."""

from __future__ import annotations

import numpy as np


def spread(
    values: np.ndarray, axis: int | tuple[int, ...] | None = -1, *, keepdims: bool = False
) -> np.ndarray:
    """Return whether the values along an axis differ; NaN (abstained) is left out.

    Fewer than two values never differ. Compared as maximum > minimum: a standard deviation of seven equal
    numbers need not be exactly 0.
    """
    known = ~np.isnan(values)
    top = np.where(known, values, -np.inf).max(axis=axis, keepdims=keepdims)
    bottom = np.where(known, values, np.inf).min(axis=axis, keepdims=keepdims)
    return top > bottom


def keep_groups(task_rewards: np.ndarray) -> np.ndarray:
    """Groups worth training on: task rewards differ (DAPO, arXiv:2503.14476, eq. 11).

    Args:
        task_rewards: float [P, G], the raw reward of the task, before length shaping and KL; NaN = abstained.

    Returns:
        bool [P].
    """
    return spread(np.asarray(task_rewards, np.float64))
