"""Reward calls in worker processes: one that hangs or crashes costs that call."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable
from typing import Any

from jaxrl.config import ConfigError
from jaxrl.rewards import calls, worker
from jaxrl.workers.config import PoolConfig
from jaxrl.workers.pools import open_workers

Result = tuple[int, list[int], calls.Outcome]
"""(term, places in the batch, what the call gave)"""


class Processes:
    """An executor of ``workers`` processes, here or on a Ray cluster. One ``run`` at a time."""

    def __init__(self, setup: worker.Setup, workers: int, pool: PoolConfig):
        self._workers = open_workers(
            pool,
            "jaxrl.rewards.worker:make",
            setup,
            count=workers,
            timeout_seconds=setup.timeout_seconds,
            read=_outcome,
            who="reward",
            key="rewards.pool",
        )

    @property
    def pids(self) -> list[int]:
        return self._workers.pids

    def run(self, requests: Iterable[worker.Request]) -> Generator[Result]:
        """Yields (term, places, outcome); a call whose process was lost failed with "timeout" or "crash"."""
        try:
            for request in requests:
                self._submit(request)
            while self._workers.busy:
                for request, number, outcome, failure in self._workers.poll():
                    places, after = request.places, number + 1
                    if request.each:
                        places = [request.places[number]]
                        if failure and after < len(request.places):  # those that it had not begun
                            left = range(after, len(request.places))
                            rest, rows = request.places[after:], request.rows.take(left)
                            self._submit(dataclasses.replace(request, places=rest, rows=rows), first=True)
                    yield request.term, places, calls.Outcome(failure=failure) if failure else outcome
        finally:
            self._workers.cancel()

    def close(self) -> None:
        self._workers.close()

    def _submit(self, request: worker.Request, first: bool = False) -> None:
        try:
            self._workers.submit(request, answers=len(request.places) if request.each else 1, first=first)
        except RuntimeError:
            raise
        except Exception as error:
            raise ConfigError(
                f"a column of the data cannot be sent to a reward process ({type(error).__name__}: {error}); "
                f"leave the column out, or set workers: 0",
                key="rewards.workers",
            ) from error


def _outcome(message: dict[str, Any]) -> calls.Outcome:
    failure = message["failure"]
    return calls.Outcome(
        values=message["values"],
        answers=message["answers"],
        bad=[(int(i), kind, text) for i, kind, text in message["bad"]],
        failure=None if failure is None else (failure[0], failure[1]),
    )
