"""Worker processes where the settings want them: on this machine, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxrl.workers.config import PoolConfig
from jaxrl.workers.local import Workers
from jaxrl.workers.ray import RayWorkers


def open_workers(
    pool: PoolConfig,
    make: str,
    setup: Any,
    *,
    count: int,
    timeout_seconds: float,
    read: Callable[[Any], Any],
    who: str,
    key: str,
) -> Any:
    """``workers.Workers``, or the like of it on a Ray cluster. ``key`` is the setting of ``pool``."""
    if not pool.is_ray:
        return Workers(make, setup, count=count, timeout_seconds=timeout_seconds, read=read, who=who)
    return RayWorkers(
        make, setup, count=count, timeout_seconds=timeout_seconds, read=read, who=who, pool=pool, key=key
    )
