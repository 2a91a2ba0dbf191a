"""Start-up on one process, several hosts or Pathways, and the little that processes tell each other.

Every process runs the same program on the same data; the mesh spans all devices. What only one may do (write
files, call reward functions) the first does, and ``broadcast`` hands the result to the others.

Environment variables that are read: ``JAX_PLATFORMS`` (``proxy``: see ``pathways.py``);
``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES``, ``JAX_PROCESS_ID`` (processes started by hand);
``TPU_WORKER_HOSTNAMES``, ``MEGASCALE_NUM_SLICES`` (set by GKE on multi-host slices).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxrl import pathways
from jaxrl.config import ConfigError, run_cli

HEARTBEAT_SECONDS = 30
"""A process that is silent for so long is given up, and the run with it."""


def start() -> None:
    """Join the other processes, if there are any. Call once, before the first use of a device."""
    env = os.environ
    if pathways.is_used():
        pathways.initialize()
        return
    if jax.distributed.is_initialized():
        return
    if address := env.get("JAX_COORDINATOR_ADDRESS"):
        missing = [name for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID") if name not in env]
        if missing:
            raise ConfigError(
                f"JAX_COORDINATOR_ADDRESS is set ({address}) but {' and '.join(missing)} not: set all three"
            )
        count, number = int(env["JAX_NUM_PROCESSES"]), int(env["JAX_PROCESS_ID"])
        jax.distributed.initialize(address, count, number, heartbeat_timeout_seconds=HEARTBEAT_SECONDS)
    elif env.get("TPU_WORKER_HOSTNAMES", "").count(",") or int(env.get("MEGASCALE_NUM_SLICES", "1")) > 1:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS)


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """An exception in here ends this process at once when there are others.

    They may be waiting for it inside a collective, where an orderly end, which waits for them, would never
    come; once it is gone, they are ended by the coordination service.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        os._exit(_message_and_code(error))


def _message_and_code(error: Exception) -> int:
    def again(_):
        raise error

    try:
        code = run_cli(again, [])
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def is_first() -> bool:
    """True on the one process that writes files and calls reward functions."""
    return jax.process_index() == 0


def broadcast(value: Any) -> Any:
    """The first process's JSON-able ``value``, on every process. Floats arrive bit for bit, NaN included."""
    if jax.process_count() == 1:
        return value
    from jax.experimental.multihost_utils import broadcast_one_to_all

    data = np.frombuffer(json.dumps(value if is_first() else None).encode(), np.uint8)
    size = int(broadcast_one_to_all(np.int32(len(data))))
    buffer = np.zeros(size, np.uint8)
    if is_first():
        buffer[:] = data
    return json.loads(np.asarray(broadcast_one_to_all(buffer)).tobytes().decode())


def to_host(array: jax.Array) -> np.ndarray:
    """The whole of a global array as numpy, on every process."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(array, tiled=True))


def any_process(flag: bool) -> bool:
    """Whether ``flag`` is set on any process; all get the same answer."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental.multihost_utils import process_allgather

    return bool(np.any(process_allgather(np.int32(flag))))


def barrier(name: str) -> None:
    """Wait until every process is here."""
    if jax.process_count() > 1:
        from jax.experimental.multihost_utils import sync_global_devices

        sync_global_devices(name)
