"""The process side of the reward pool: makes the calls of a request (see ``jaxrl/workers/local.py``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxrl.rewards import calls
from jaxrl.workers.local import Serve


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
    rows: calls.Rows
    each: bool
    want_answers: bool


def make(setup: Setup) -> Serve:
    """Loads the terms; a request is answered with the ``Outcome`` of each call."""
    rewards = [calls.load(name, args) for name, args in setup.terms]
    for reward in rewards:
        reward.prepare()

    def serve(request: Request) -> Iterator[dict[str, Any]]:
        singles = (request.rows.take([i]) for i in range(len(request.rows)))
        for rows in singles if request.each else [request.rows]:
            yield dataclasses.asdict(rewards[request.term].call(rows, request.want_answers))

    return serve
