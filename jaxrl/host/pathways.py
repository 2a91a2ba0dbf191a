"""Pathways (``JAX_PLATFORMS=proxy``): one process drives all devices of one or more slices through a proxy.

The program is the same: ``jax.process_count()`` is 1, every device is addressable, ``jax.distributed`` is not
used. What differs: the hosts of the TPUs are not this one, so what they write themselves (traces, and
checkpoints with ``ENABLE_PATHWAYS_PERSISTENCE=1``) goes to a bucket.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from jaxrl.config import ConfigError
from jaxrl.store.folders import is_remote

_PERSISTENCE = "ENABLE_PATHWAYS_PERSISTENCE"


def is_used() -> bool:
    return "proxy" in os.environ.get("JAX_PLATFORMS", "").split(",")


def workers_write_checkpoints() -> bool:
    """Return whether arrays go from the TPUs' hosts to the bucket directly (Pathways' persistence API).

    Otherwise they go through this process.
    """
    return is_used() and os.environ.get(_PERSISTENCE) == "1"


def initialize() -> None:
    """Registers the proxy with JAX. ConfigError without the package, or with a variable it cannot read."""
    try:
        import pathwaysutils
    except ImportError as error:
        raise ConfigError("JAX_PLATFORMS=proxy needs Pathways: pip install 'jaxrl[pathways]'") from error
    if os.environ.get(_PERSISTENCE, "0") not in ("0", "1"):
        raise ConfigError(f"{_PERSISTENCE}={os.environ[_PERSISTENCE]}: needs 0 or 1")
    pathwaysutils.initialize()


def problems(checkpoints: str, *, traced: bool, executables: bool) -> Iterator[tuple[str, str]]:
    """(key, message) of what a run asks for and Pathways does otherwise.

    Args:
        checkpoints: folder of the run's checkpoints.
        traced: ``profile.start_step`` is given.
        executables: ``executables`` is given.
    """
    if not is_used():
        return
    in_bucket = is_remote(checkpoints)
    if workers_write_checkpoints() and not in_bucket:
        yield (
            "checkpoint.output_dir",
            f"{_PERSISTENCE}=1 has the TPUs' hosts write the checkpoints: needs gs://bucket/path",
        )
    if traced and not in_bucket:
        yield (
            "profile.start_step",
            "under Pathways the TPUs' hosts write the trace, beside the checkpoints: needs "
            "checkpoint.output_dir in a bucket (gs://)",
        )
    if executables:
        yield (
            "executables",
            "Pathways has a compilation cache of its own; leave it out with JAX_PLATFORMS=proxy",
        )
