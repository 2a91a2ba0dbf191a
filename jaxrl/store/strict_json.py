"""JSON that every reader takes: NaN and infinities, which JSON does not have, become null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Return ``value`` as JSON can hold it: numpy's arrays and scalars as lists and numbers, and None for
    what is not finite. What JSON has no word for stays, and ``dumps`` refuses it."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that ``plain`` was given; None stands for every number that was not finite."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}


def dumps(value: Any, indent: int | None = None) -> str:
    """Return ``plain(value)`` as JSON text. TypeError for what JSON cannot hold."""
    return json.dumps(plain(value), allow_nan=False, indent=indent)
