"""Start-up on one process, several hosts or Pathways, and the little that processes tell each other.

Every process runs the same program on the same data; the mesh spans all devices. What only one may do (write
files, call reward functions) the first does, and ``broadcast`` hands the result to the others. Values travel
through the key-value store of JAX's coordination service: no device waits, and nothing is compiled.

Environment variables that are read: ``JAX_PLATFORMS`` (``proxy``: see ``pathways.py``);
``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES``, ``JAX_PROCESS_ID`` (processes started by hand);
``TPU_WORKER_HOSTNAMES``, ``MEGASCALE_NUM_SLICES`` (set by GKE on multi-host slices).
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather, sync_global_devices

from jaxrl.config import ConfigError
from jaxrl.host import pathways

logger = logging.getLogger("jaxrl")

HEARTBEAT_SECONDS = 30
"""JAX gives up a process that is silent for this long, and the run with it."""
JOIN_SECONDS = 300
"""Longest wait for all processes to start."""
_LONGEST_MS = 7 * 24 * 3600 * 1000
"""Longest wait for another process's value; one that is gone ends the wait before (see ``failures.py``)."""
_READ = "jaxrl/read"
"""Counts how often a value was read, over all processes."""

_exchanges, _tells = itertools.count(), itertools.count()
_pending: list[str] = []
"""Keys of this process that others may still have to read."""


def start() -> None:
    """Join the other processes, if there are any. Call once, before the first use of a device.

    Raises:
        ConfigError: the environment variables do not name the processes.
    """
    if pathways.is_used():
        pathways.initialize()
        return
    if not jax.distributed.is_initialized() and not _join():
        return
    if count() > 1:
        client().key_value_set(f"jaxrl/host/{number()}", socket.gethostname(), allow_overwrite=True)
        client().blocking_key_value_get("jaxrl/host/0", JOIN_SECONDS * 1000)
        logger.info("process %d of %d; %s coordinates", number(), count(), name_of(0))


def has_others() -> bool:
    """Return whether the environment says that there are other processes to join."""
    env = os.environ
    if pathways.is_used():
        return False
    hosts, slices = env.get("TPU_WORKER_HOSTNAMES", ""), env.get("MEGASCALE_NUM_SLICES", "1")
    return bool(env.get("JAX_COORDINATOR_ADDRESS")) or "," in hosts or int(slices) > 1


def _join() -> bool:
    """Return whether there are processes to join, after doing so."""
    env = os.environ
    if address := env.get("JAX_COORDINATOR_ADDRESS"):
        missing = [name for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID") if name not in env]
        if missing:
            raise ConfigError(
                f"JAX_COORDINATOR_ADDRESS is set ({address}) but {' and '.join(missing)} not: set all three"
            )
        given = env["JAX_NUM_PROCESSES"], env["JAX_PROCESS_ID"]
        if not all(text.isdecimal() for text in given) or not int(given[1]) < int(given[0]):
            raise ConfigError(
                f"JAX_NUM_PROCESSES={given[0]}, JAX_PROCESS_ID={given[1]}: expected the number of processes, "
                "and this one's number, counted from 0"
            )
        total, own = int(given[0]), int(given[1])
        logger.info(
            "process %d of %d on %s: waiting for the others at %s, at most %d s",
            own,
            total,
            socket.gethostname(),
            address,
            JOIN_SECONDS,
        )
        jax.distributed.initialize(
            address,
            total,
            own,
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
        return True
    if has_others():
        jax.distributed.initialize(
            initialization_timeout=JOIN_SECONDS, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
        return True
    return False


def _state() -> Any:
    """JAX's own record of the processes. It has no public name; Orbax takes the store from here as well."""
    return importlib.import_module("jax._src.distributed").global_state


def client() -> Any:
    """The key-value store that all processes share. Only where ``count() > 1``."""
    return _state().client


def count() -> int:
    """Number of processes. Does not start a backend."""
    return 1 if client() is None else int(_state().num_processes)


def number() -> int:
    """This process's number as JAX's coordination service counts; process 0 runs that service."""
    return 0 if client() is None else int(_state().process_id)


def name_of(process: int) -> str:
    """``process 1 (host-b)``."""
    found = dict(client().key_value_dir_get("jaxrl/host/"))
    host = found.get(f"jaxrl/host/{process}")
    return f"process {process} ({host})" if host else f"process {process}"


def is_first() -> bool:
    """True on the one process that writes files and calls reward functions."""
    return jax.process_index() == 0


def broadcast(value: Any) -> Any:
    """The first process's JSON-able ``value``, on every process. Floats arrive bit for bit, NaN included."""
    return value if count() == 1 else _tell(value, source=is_first())


def exchange(value: Any) -> list[Any]:
    """The JSON-able ``value`` of every process, by ``number()``; equal on all of them."""
    if count() == 1:
        return [value]
    store, own = client(), number()
    key = f"jaxrl/exchange/{next(_exchanges)}"
    store.key_value_set(f"{key}/{own}", json.dumps(value))
    found = None
    if own == 0:
        texts = [store.blocking_key_value_get(f"{key}/{n}", _LONGEST_MS) for n in range(count())]
        found = [json.loads(text) for text in texts]
    found = _tell(found, source=own == 0)
    store.key_value_delete(f"{key}/{own}")
    return found


def _tell(value: Any, *, source: bool) -> Any:
    store, told = client(), next(_tells)
    key = f"jaxrl/told/{told}"
    if not source:
        text = store.blocking_key_value_get(key, _LONGEST_MS)
        store.key_value_increment(_READ, 1)
        return json.loads(text)
    if _pending and store.key_value_increment(_READ, 0) == told * (count() - 1):  # all have read all
        for old in _pending:
            store.key_value_delete(old)
        _pending.clear()
    text = json.dumps(value)
    store.key_value_set(key, text)
    _pending.append(key)
    return json.loads(text)


def gather(numbers: Sequence[int]) -> np.ndarray:
    """[processes, n] uint32: these few numbers of every process, equal on all of them. Waits for the
    devices."""
    own = np.array(numbers, np.uint32)
    if count() == 1:
        return own[None]
    return np.asarray(process_allgather(own)).reshape(count(), len(own))


def to_host(array: jax.Array) -> np.ndarray:
    """The whole of a global array as numpy, on every process."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(process_allgather(array, tiled=True))


def barrier(name: str) -> None:
    """Wait until every process is here."""
    if count() > 1:
        sync_global_devices(name)
