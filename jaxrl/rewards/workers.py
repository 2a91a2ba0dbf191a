"""Reward calls in worker processes: one that hangs or crashes costs that call."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from jaxrl.config import ConfigError
from jaxrl.rewards import functions
from jaxrl.workers.config import PoolConfig
from jaxrl.workers.local import Serve
from jaxrl.workers.pools import open_workers

Result = tuple[int, list[int], functions.Outcome]
"""(term, places in the batch, what the call gave)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """First message to a worker."""

    terms: list[tuple[str, dict[str, Any]]]
    """(name, args) of each function term; a request names its term by position."""
    timeout_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Calls of one term to make: one a sample (``each``), answered one by one, or one for all rows."""

    term: int
    places: list[int]
    """Where the rows stand in the batch."""
    rows: functions.Rows
    each: bool
    want_answers: bool


def make(setup: Setup) -> Serve:
    """Loads the terms; a request is answered with the ``Outcome`` of each call."""
    rewards = [functions.load(name, args) for name, args in setup.terms]
    for reward in rewards:
        reward.prepare()

    def serve(request: Request) -> Iterator[dict[str, Any]]:
        singles = (request.rows.take([i]) for i in range(len(request.rows)))
        for rows in singles if request.each else [request.rows]:
            yield dataclasses.asdict(rewards[request.term].call(rows, request.want_answers))

    return serve


class Processes:
    """An executor of ``workers`` processes, here or on a Ray cluster. One ``run`` at a time."""

    def __init__(self, setup: Setup, workers: int, pool: PoolConfig):
        self._workers = open_workers(
            pool,
            "jaxrl.rewards.workers:make",
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

    def run(self, requests: Iterable[Request]) -> Generator[Result]:
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
                    yield request.term, places, functions.Outcome(failure=failure) if failure else outcome
        finally:
            self._workers.cancel()

    def close(self) -> None:
        self._workers.close()

    def _submit(self, request: Request, first: bool = False) -> None:
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


def _outcome(message: dict[str, Any]) -> functions.Outcome:
    failure = message["failure"]
    return functions.Outcome(
        values=message["values"],
        answers=message["answers"],
        bad=[(int(i), kind, text) for i, kind, text in message["bad"]],
        failure=None if failure is None else (failure[0], failure[1]),
    )
