"""Workers on a Ray cluster (extra ``ray``): the processes of ``jaxrl/workers/local.py``, on other machines.

Each worker is a Ray actor that holds one process on its machine, as the training process holds its own:
time limit, kill, process group and JSON answers are the local ones, and an actor neither runs other people's
code nor reads their pickles. An actor that is lost (killed, or its machine) costs its request a retry.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxrl.config import ConfigError, UserCodeError
from jaxrl.workers.config import PoolConfig
from jaxrl.workers.local import STARTS_THAT_FAIL, Job, Reply, Requests, Workers

logger = logging.getLogger("jaxrl")

_START_SECONDS = 600.0
"""Limit for the first worker: the cluster may have to grow, and to fetch an image."""
_NETWORK_SECONDS = 60.0
"""Time beyond its limits that a request may take before its actor counts as lost."""
_CONNECT_SECONDS = 30.0
_ATTEMPTS = 3


class RayWorkers(Requests):
    """``count`` processes on a Ray cluster that answer requests: as ``workers.Workers``, whose arguments and
    methods it has.

    Args:
        pool: which cluster, and what a worker takes of it.
        key: the setting that ``pool`` comes from, for messages.

    Raises, from the constructor:
        ConfigError: there is no such cluster.
    """

    def __init__(
        self,
        make: str,
        setup: Any,
        *,
        count: int,
        timeout_seconds: float,
        read: Callable[[Any], Any],
        who: str,
        pool: PoolConfig,
        key: str,
    ):
        super().__init__()
        self._timeout_seconds, self._read, self._who, self._key = timeout_seconds, read, who, key
        self._ray = connect(pool, key)
        self._tell_what_is_missing(pool, count)
        options = {"num_cpus": pool.num_cpus, "resources": dict(pool.resources) or None, "max_restarts": 0}
        actor = self._ray.remote(**{k: v for k, v in options.items() if v is not None})(Supervisor)
        start = (make, pickle.dumps(setup), timeout_seconds, who, os.getcwd(), sys.path[:])
        self._new = lambda: _Worker(actor.remote(*start))
        self._workers = [self._new() for _ in range(count)]
        self._close = weakref.finalize(self, _kill_all, self._ray, self._workers)

    @property
    def pids(self) -> list[int]:
        """None: they are no processes of this machine."""
        return []

    def poll(self, *, block: bool = True) -> list[Reply]:
        """Answers that have arrived. With ``block`` it waits until something has happened, which need not be
        an answer."""
        for w in self._workers:
            if self._queue and w.ready and w.job is None:
                w.give(self._queue.popleft(), self._timeout_seconds)
        pending = [w.pending for w in self._workers if w.pending is not None]
        if not pending:
            return []
        if block:
            deadline = min(w.deadline for w in self._workers if w.pending is not None)
            self._ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        done, _ = self._ray.wait(pending, num_returns=len(pending), timeout=0)
        replies: list[Reply] = []
        for w in list(self._workers):
            if w.pending in done:
                replies += self._receive(w)
            elif w.pending is not None and w.deadline < time.monotonic():
                replies += self._late(w)
        return replies

    def _receive(self, w: _Worker) -> Iterator[Reply]:
        from ray.exceptions import RayError

        try:
            found = self._ray.get(w.pending)
        except RayError as error:
            yield from self._lost(w, error)
            return
        w.pending = None
        if found.error is not None:
            raise (ConfigError if found.is_config_error else UserCodeError)(found.error)
        if not w.ready:
            w.ready, self._starts_failed = True, 0
            return
        job, w.job = w.job, None
        assert job is not None
        for number, answer, failure in found.replies:
            if failure is None:
                try:
                    answer = self._read(json.loads(answer))
                except (ValueError, TypeError, KeyError) as error:
                    failure = ("crash", f"its answer is none: {error}")
            yield Reply(job.request, number, None if failure else answer, failure)
            if failure is not None:
                break

    def _late(self, w: _Worker) -> Iterator[Reply]:
        if w.ready:
            yield from self._lost(w, "no word from its actor")
        elif not any(other.ready for other in self._workers):
            raise ConfigError(
                f"no {self._who} worker on the Ray cluster in {_START_SECONDS:.0f} s: {self._resources()}",
                self._key,
            )
        else:  # the others do the work until the cluster has room for it
            w.deadline = time.monotonic() + _START_SECONDS

    def _lost(self, w: _Worker, why: Any) -> Iterator[Reply]:
        """The actor is gone. Its request is tried elsewhere."""
        job, started = w.job, w.ready
        self._replace(w)
        if not started:
            self._starts_failed += 1
            if self._starts_failed >= STARTS_THAT_FAIL:
                raise ConfigError(
                    f"{self._who} workers cannot start on the Ray cluster; its machines need jaxrl, "
                    f"installed or in runtime_env: {why}",
                    self._key,
                )
        if job is None:
            return
        if job.attempts + 1 < _ATTEMPTS:
            logger.warning("a Ray worker of the %s was lost; its request is tried again: %s", self._who, why)
            self._queue.appendleft(job._replace(attempts=job.attempts + 1))
        else:
            yield Reply(job.request, 0, None, ("crash", f"its Ray worker was lost {_ATTEMPTS} times: {why}"))

    def _replace(self, w: _Worker) -> None:
        w.kill(self._ray)
        self._workers[self._workers.index(w)] = self._new()

    def _tell_what_is_missing(self, pool: PoolConfig, count: int) -> None:
        there = self._ray.cluster_resources()
        wanted = {"CPU": pool.num_cpus * count, **{k: v * count for k, v in pool.resources.items()}}
        missing = {k: f"{v:g} of {there.get(k, 0):g}" for k, v in wanted.items() if v > there.get(k, 0)}
        if missing:
            logger.warning(
                "%s: %d workers ask the Ray cluster for more than it has (%s); those that have no room wait",
                self._key,
                count,
                ", ".join(f"{k} {v}" for k, v in missing.items()),
            )

    def _resources(self) -> str:
        return f"it has {self._ray.cluster_resources()}, of which free {self._ray.available_resources()}"


class _Worker:
    """One actor, and what it is asked."""

    def __init__(self, actor: Any):
        self.actor = actor
        self.ready = False
        self.job: Job | None = None
        self.pending: Any = actor.start.remote()
        self.deadline = time.monotonic() + _START_SECONDS

    def give(self, job: Job, timeout_seconds: float) -> None:
        self.job = job
        self.pending = self.actor.run.remote(job.pickled, job.answers)
        self.deadline = time.monotonic() + _START_SECONDS + job.answers * timeout_seconds + _NETWORK_SECONDS

    def kill(self, ray: Any) -> None:
        with contextlib.suppress(Exception):  # the cluster may be gone
            ray.kill(self.actor)


def _kill_all(ray: Any, workers: Sequence[_Worker]) -> None:
    if ray.is_initialized():
        for w in workers:
            w.kill(ray)


def connect(pool: PoolConfig, key: str) -> Any:
    """The ``ray`` module, connected to the cluster; once a program.

    Raises:
        ConfigError: there is no such cluster, or it does not take ``runtime_env``.
    """
    import ray

    if ray.is_initialized():
        return ray
    # Ray ends the program at SIGTERM; ours saves first (see preemption.py).
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        _probe(pool.address)
        ray.init(
            address=pool.address,
            runtime_env=dict(pool.runtime_env) or None,
            logging_level=logging.WARNING,
            include_dashboard=False if pool.address == "local" else None,
        )
    except Exception as error:  # OSError, ValueError, RuntimeError, those of its transport
        raise ConfigError(
            f"no Ray cluster at {pool.address!r} ({type(error).__name__}: {error}). `ray start --head` "
            "starts one; address: local, one of this program's own",
            f"{key}.address",
        ) from None
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
    return ray


def _probe(address: str) -> None:
    """OSError when nobody listens at ``address``, where ``ray.init`` would wait for ever."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()


# ---- on the cluster ----


class Found(NamedTuple):
    """Answer of an actor: replies, or why its process cannot start."""

    replies: Sequence[tuple[int, str | None, tuple[str, str] | None]] = ()
    """(number, answer as JSON, failure) of a request."""
    error: str | None = None
    is_config_error: bool = False


class Supervisor:
    """The actor: one local worker, and its requests one after another."""

    def __init__(
        self, make: str, setup: bytes, timeout_seconds: float, who: str, folder: str, paths: list[str]
    ):
        # Without a working_dir of the job's runtime_env, a file of the user is looked up where the training
        # process does, if this machine has that folder.
        if "working_dir" not in _runtime_env() and os.path.isdir(folder):
            os.chdir(folder)
        sys.path += [path for path in paths if path not in sys.path and os.path.isdir(path)]
        self._workers = Workers(
            make, pickle.loads(setup), count=1, timeout_seconds=timeout_seconds, read=_same, who=who
        )

    def start(self) -> Found:
        """Waits for the process's imports."""
        try:
            while not self._workers.started:
                self._workers.poll()
        except (ConfigError, UserCodeError) as error:
            return Found(error=str(error), is_config_error=isinstance(error, ConfigError))
        return Found()

    def run(self, pickled: bytes, answers: int) -> Found:
        """The answers to a request, up to the first that failed."""
        replies = []
        try:
            self._workers.submit_pickled(pickled, answers=answers)
            while self._workers.busy:
                for _, number, answer, failure in self._workers.poll():
                    replies.append((number, None if failure else json.dumps(answer), failure))
        except (ConfigError, UserCodeError) as error:
            return Found(error=str(error), is_config_error=isinstance(error, ConfigError))
        return Found(replies)


def _runtime_env() -> dict[str, Any]:
    import ray

    return dict(ray.get_runtime_context().runtime_env)


def _same(answer: Any) -> Any:
    return answer
