"""The environment pool: steps of many episodes at once, in processes that may hang or crash."""

from __future__ import annotations

import logging
from collections import deque
from typing import Literal

from jaxrl.config import ConfigError, UserCodeError
from jaxrl.environments import calls
from jaxrl.environments.config import EnvironmentConfig
from jaxrl.workers.pools import open_workers

log = logging.getLogger("jaxrl")


class EnvironmentPool:
    """Makes calls and hands back what they gave, in any order. Close it: it owns processes.

    A call that fails (exception, wrong type, time limit, loss of its process) gives an outcome that says so;
    each kind is logged once.

    Raises, from the constructor, ``submit`` or ``poll``:
        ConfigError: the environment cannot be made, or a column of the data cannot be sent to it.
        UserCodeError: its module cannot be imported, or a call failed under ``on_error: stop``.
    """

    def __init__(self, config: EnvironmentConfig, on_error: Literal["abstain", "zero", "stop"] = "abstain"):
        assert config.name is not None
        self._on_error = on_error
        self._reported: set[str] = set()
        self._here = calls.load(config.name, config.args)
        self._done: deque[tuple[int, calls.Outcome]] = deque()
        self._workers = (
            open_workers(
                config.pool,
                "jaxrl.environments.calls:make",
                (config.name, dict(config.args)),
                count=config.workers,
                timeout_seconds=config.timeout_seconds,
                read=calls.outcome,
                who="environment",
                key="environment.pool",
            )
            if config.workers
            else None
        )

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return self._workers.pids if self._workers else []

    def submit(self, call: calls.Call) -> None:
        """Queue a call; its outcome comes from ``poll``."""
        if self._workers is None:
            self._done.append((call.episode, calls.run(self._here, call)))
            return
        try:
            self._workers.submit(call)
        except RuntimeError:
            raise
        except Exception as error:
            raise ConfigError(
                f"a column of the data cannot be sent to an environment's process ({type(error).__name__}: "
                f"{error}); leave the column out, or set workers: 0",
                "environment.workers",
            ) from error

    def poll(self, *, block: bool) -> list[tuple[int, calls.Outcome]]:
        """(episode, outcome) of calls that are done; with ``block`` at least one, if any is open."""
        while self._workers and self._workers.busy:
            for call, _, found, failure in self._workers.poll(block=block and not self._done):
                self._done.append((call.episode, calls.Outcome(failure=failure) if failure else found))
            if self._done or not block:
                break
        results = list(self._done)
        self._done.clear()
        for _, found in results:
            if found.failure:
                self._failed(*found.failure)
        return results

    def cancel(self) -> None:
        """Forget what is open."""
        self._done.clear()
        if self._workers:
            self._workers.cancel()

    def close(self) -> None:
        """End the processes, and everything they started."""
        if self._workers:
            self._workers.close()

    def _failed(self, kind: str, detail: str) -> None:
        if self._on_error == "stop":
            raise UserCodeError(f"the environment failed ({kind}): {detail}")
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning("the environment failed (%s; more of this kind are only counted): %s", kind, detail)
