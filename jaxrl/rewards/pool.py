"""The reward pool: scores a batch with every term, in processes that may hang, crash or talk nonsense.

``RewardPool`` splits the batch into requests and joins what comes back; an executor carries the requests out.
There are two: ``Here`` (in this process) and ``Processes`` (on this machine or a Ray cluster). Another one
needs ``run`` and ``close``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl.config import ConfigError, UserCodeError
from jaxrl.rewards import functions
from jaxrl.rewards.config import RewardsConfig, RewardTerm
from jaxrl.rewards.workers import Processes, Request, Result, Setup

log = logging.getLogger("jaxrl")

_FIRST_RETRIES = 16


class Scores(NamedTuple):
    """Rewards of B samples."""

    rewards: np.ndarray
    """[B] float64: weighted sum over the terms that did not abstain; NaN where all did."""
    parts: dict[str, np.ndarray]
    """By term: [B] float64 unweighted values, NaN where the term abstained (or failed, under ``abstain``)."""
    errors: dict[str, int]
    """Failed samples by ``<term>/<kind>``, and failed calls for the whole batch by ``<term>/batch_<kind>``.
    Kinds: exception, timeout, crash, nan, type, count."""
    answers: list[str | None]
    """[B] what the task term read as the answer, None where nothing or where the term does not say."""


class Executor(Protocol):
    """Carries out requests, in any order."""

    def run(self, requests: Iterable[Request]) -> Generator[Result]:
        """Yields (term, places, outcome) of every call. Closing the generator early gives the rest up."""

    @property
    def pids(self) -> list[int]: ...

    def close(self) -> None: ...


class Here:
    """Makes calls in this process, without a time limit: one that hangs or crashes takes the run with it."""

    def __init__(self, setup: Setup):
        self._rewards = [functions.load(name, args) for name, args in setup.terms]

    @property
    def pids(self) -> list[int]:
        return []

    def run(self, requests: Iterable[Request]) -> Generator[Result]:
        for request in requests:
            reward = self._rewards[request.term]
            if request.each:
                for i, place in enumerate(request.places):
                    yield request.term, [place], reward.call(request.rows.take([i]), request.want_answers)
            else:
                yield request.term, request.places, reward.call(request.rows, request.want_answers)

    def close(self) -> None:
        pass


class RewardPool:
    """Scores batches. Thread-safe: calls from several threads take turns. Close it, or use it in a ``with``.

    What a failure costs: a value that is NaN, infinite or no number, its sample. An exception, a result of
    wrong type or length, a call over its time limit or the loss of its process: the sample, if the term makes
    one call a sample. A failed call for the whole batch is repeated sample by sample; if none of the first 16
    works, all samples have failed. A failed sample counts for its term as ``on_error`` says; each kind of
    failure of a term is logged once, with the first traceback, and always counted.

    Raises, from the constructor or from ``score``:
        ConfigError: a term cannot be loaded, or needs a column the data does not have.
        UserCodeError: a user's module cannot be imported, or a term failed under ``on_error: stop``.
    """

    def __init__(self, config: RewardsConfig):
        self._config = config
        self._functions = [term for term in config.terms if not term.is_given]
        named = [(term.name, dict(term.args)) for term in self._functions]
        setup = Setup(terms=named, timeout_seconds=config.timeout_seconds)
        rewards = [functions.load(name, args) for name, args in setup.terms]
        self._each = [
            reward.built_in if term.per_sample is None else term.per_sample
            for term, reward in zip(self._functions, rewards, strict=True)
        ]
        self._built_in = [reward.built_in for reward in rewards]
        in_processes = config.workers > 0 and bool(self._functions)
        self._executor: Executor = (
            Processes(setup, config.workers, config.pool) if in_processes else Here(setup)
        )
        self._reported: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        token_ids: Sequence[Sequence[int] | np.ndarray],
        columns: Mapping[str, Sequence[Any]],
        given: Mapping[str, np.ndarray] | None = None,
        failed: Mapping[int, str] | None = None,
    ) -> Scores:
        """Rewards of B samples, the samples of a prompt next to each other.

        Args:
            columns: the dataset's columns, a list of B values each.
            given: [B] values (NaN abstains) of the terms that were scored elsewhere (reward_model,
                environment), by label.
            failed: samples that are no completions, with the kind of failure: they count as failed in every
                term.
        """
        rows = functions.Rows(
            prompts=list(prompts),
            completions=list(completions),
            token_ids=[np.asarray(ids).tolist() for ids in token_ids],
            columns={name: list(values) for name, values in columns.items()},
        )
        batch = _Batch(self._config, self._functions, len(rows))
        batch.give(given or {})
        _check_lengths(rows)
        with self._lock:
            if len(rows):
                self._run(rows, batch)
        for row, kind in (failed or {}).items():
            batch.lose(row, kind)
        for term, count in batch.abstained.items():
            if count and self._built_in[term]:  # a user's function has its reasons
                self._report_abstained(term, count, len(rows))
        return batch.scores()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers; none when functions run in this process."""
        return self._executor.pids

    def close(self) -> None:
        """End the workers, and everything their functions started; a running ``score`` finishes first."""
        with self._lock:
            self._executor.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, rows: functions.Rows, batch: _Batch) -> None:
        everything = list(range(len(rows)))
        plan = [(term, everything, each) for term, each in enumerate(self._each)]
        failed = self._carry_out(rows, batch, plan)
        # A call for the whole batch that failed is repeated sample by sample, so that one bad sample costs
        # one sample. When none of the first ones works either, the function is broken: the rest is not tried.
        for term, (kind, detail) in failed.items():
            batch.errors[f"{self._functions[term].title}/batch_{kind}"] += 1
            self._report(term, f"batch_{kind}", detail)
            first, rest = everything[:_FIRST_RETRIES], everything[_FIRST_RETRIES:]
            self._carry_out(rows, batch, [(term, first, True)])
            if set(first) <= batch.failed[term]:
                for row in rest:
                    self._fail(batch, term, row, kind, detail)
            else:
                self._carry_out(rows, batch, [(term, rest, True)])

    def _carry_out(
        self, rows: functions.Rows, batch: _Batch, plan: list[tuple[int, list[int], bool]]
    ) -> dict[int, tuple[str, str]]:
        """Run (term, rows, one call each), record it. Returns how calls for several rows failed, by term."""
        requests = [
            Request(
                term=term,
                places=places,
                rows=rows.take(places),
                each=each,
                want_answers=self._functions[term].title == self._config.task,
            )
            for term, chosen, each in sorted(plan, key=lambda p: p[2])  # whole batches take longest
            for places in (_slices(chosen, self._config.workers) if each else [chosen])
        ]
        failed: dict[int, tuple[str, str]] = {}
        with contextlib.closing(self._executor.run(requests)) as results:
            for term, places, outcome in results:
                if outcome.failure is None:
                    batch.record(term, places, outcome)
                    for i, kind, detail in outcome.bad:
                        self._fail(batch, term, places[i], kind, detail)
                elif outcome.failure[0] == "config":
                    raise ConfigError(outcome.failure[1])
                elif len(places) == 1:
                    self._fail(batch, term, places[0], *outcome.failure)
                else:
                    self._stop_if_asked(term, *outcome.failure)
                    failed[term] = outcome.failure
        return failed

    def _fail(self, batch: _Batch, term: int, row: int, kind: str, detail: str) -> None:
        self._stop_if_asked(term, kind, detail)
        self._report(term, kind, detail)
        batch.fail(term, row, kind)

    def _stop_if_asked(self, term: int, kind: str, detail: str) -> None:
        if self._config.on_error == "stop":
            raise UserCodeError(f"reward {self._functions[term].title!r} failed ({kind}): {detail}")

    def _report(self, term: int, kind: str, detail: str) -> None:
        title = self._functions[term].title
        if (title, kind) not in self._reported:
            self._reported.add((title, kind))
            log.warning("reward %r failed (%s; more of this kind are only counted): %s", title, kind, detail)

    def _report_abstained(self, term: int, count: int, size: int) -> None:
        title = self._functions[term].title
        if (title, "abstained") not in self._reported:
            self._reported.add((title, "abstained"))
            log.warning(
                "reward %r abstained on %d of %d samples, and is not reported again: their "
                "reference is null, NaN, empty or holds no answer",
                title,
                count,
                size,
            )


class _Batch:
    """The table of one ``score``."""

    def __init__(self, config: RewardsConfig, functions: list[RewardTerm], size: int):
        self._config = config
        self._functions = functions
        self.size = size
        self.parts = {term.title: np.full(size, np.nan) for term in config.terms}
        self.errors: Counter[str] = Counter()
        self.abstained: Counter[int] = Counter()
        self.failed: dict[int, set[int]] = {term: set() for term in range(len(functions))}
        self.answers: list[str | None] = [None] * size

    def give(self, given: Mapping[str, np.ndarray]) -> None:
        wanted = {term.title for term in self._config.given_terms}
        if set(given) != wanted:
            raise ValueError(f"given parts {sorted(given)}; expected those of {sorted(wanted)}")
        for title, values in given.items():
            values = np.asarray(values, np.float64)
            if values.shape != (self.size,):
                raise ValueError(f"given part {title!r} has shape {values.shape}; expected {(self.size,)}")
            # An infinite score would make every reward of its group useless.
            good = np.isfinite(values) | np.isnan(values)
            self.parts[title] = np.where(good, values, np.nan)
            if not good.all():
                self.errors[f"{title}/nan"] += int((~good).sum())

    def record(self, term: int, rows: list[int], outcome: functions.Outcome) -> None:
        part = self.parts[self._functions[term].title]
        bad = {i for i, _, _ in outcome.bad}
        for i, row in enumerate(rows):
            value = outcome.values[i]
            part[row] = np.nan if value is None else value
            self.abstained[term] += value is None and i not in bad
            if outcome.answers:
                self.answers[row] = outcome.answers[i]

    def fail(self, term: int, row: int, kind: str) -> None:
        title = self._functions[term].title
        self.parts[title][row] = 0.0 if self._config.on_error == "zero" else np.nan
        self.errors[f"{title}/{kind}"] += 1
        self.failed[term].add(row)

    def lose(self, row: int, kind: str) -> None:
        """The environment failed: nothing of the sample counts."""
        for part in self.parts.values():
            part[row] = 0.0 if self._config.on_error == "zero" else np.nan
        self.errors[f"environment/{kind}"] += 1
        self.answers[row] = None

    def scores(self) -> Scores:
        weights = {term.title: term.weight for term in self._config.terms}
        rewards, judged = np.zeros(self.size), np.zeros(self.size, bool)
        for title, part in self.parts.items():
            present = ~np.isnan(part)
            rewards += np.where(present, weights[title] * np.where(present, part, 0.0), 0.0)
            judged |= present
        return Scores(np.where(judged, rewards, np.nan), self.parts, dict(self.errors), self.answers)


def _slices(rows: list[int], workers: int) -> list[list[int]]:
    """Runs of rows, about four a worker: few messages, and an even load."""
    size = max(1, min(32, -(-len(rows) // (4 * max(workers, 1)))))
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def _check_lengths(rows: functions.Rows) -> None:
    lengths = {
        "prompts": len(rows.prompts),
        "completions": len(rows.completions),
        "token_ids": len(rows.token_ids),
        **{f"column {name!r}": len(values) for name, values in rows.columns.items()},
    }
    if len(set(lengths.values())) > 1:
        raise ValueError(f"rewards need lists of one length; got {lengths}")
