"""Compile the programs of a run in processes of their own, and collect what the compiler says."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from jaxrl.compile.program import Lengths
from jaxrl.compile.tpu import compiler_missing, split_topology
from jaxrl.config import ConfigError, to_yaml
from jaxrl.planner.processes import Worker
from jaxrl.run.settings import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """One program, compiled or not. Bytes are of one device; ``largest`` are its largest buffers beside its
    arguments."""

    name: str
    status: str
    """"compiled", "oom" or "failed"."""
    message: str
    seconds: float
    total_bytes: int
    """HBM that it needs, arguments included; 0 when the compiler did not say."""
    largest: tuple[tuple[str, int], ...]
    argument_bytes: int = 0
    fixed: Mapping[str, float] | None = None
    """Cost without any iteration of its loop of unknown length; see ``worker``."""
    once: Mapping[str, float] | None = None
    """With one iteration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compilation:
    """All that ``ledger`` and ``cost`` work with."""

    topology: str
    lengths: Lengths
    """Assumed."""
    model: str
    """Where the model's shape comes from."""
    facts: Mapping[str, Any]
    residents: Sequence[Mapping[str, Any]]
    programs: Sequence[Mapping[str, Any]]
    """As ``describe`` makes them."""
    compiled: Mapping[str, Compiled]
    seconds: float

    @property
    def failed(self) -> list[Compiled]:
        """Programs that the compiler gave up on for another reason than memory."""
        return [c for c in self.compiled.values() if c.status == "failed"]


Report = Callable[[str], AbstractContextManager[Any]]
"""Around each piece of work, in the thread that waits for it; what it is told is for people."""


def compile_run(
    config: RunConfig,
    topology: str,
    *,
    lengths: Lengths,
    total_updates: int = 1000,
    every_shape: bool = False,
    save: str | None = None,
    processes: int = 2,
    report: Report = contextlib.nullcontext,
    cache: dict[str, Compiled] | None = None,
    stop_at_misfit: bool = False,
) -> Compilation:
    """Every program of ``config`` on ``topology``; of one function in several shapes the largest, unless
    ``every_shape``. ``save``: a folder for all executables, which ``train`` can load (``executables.py``).

    Args:
        lengths: assumed, for how often a step calls what.
        total_updates: of the run; the learning rate's schedule is part of the update.
        processes: that compile, each one program at a time.
        cache: programs that were compiled before, by what they are lowered to; new ones are put in.
        stop_at_misfit: end with the first program that does not fit by itself; the others are left out.

    Raises:
        ConfigError: there is no such topology or no compiler here, or the run cannot be put together.
    """
    split_topology(topology)
    if missing := compiler_missing():
        raise ConfigError(f"planning needs the TPU compiler: {missing}")
    start = time.monotonic()
    cache = {} if cache is None else cache
    with tempfile.TemporaryDirectory(prefix="jaxrl-plan-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(to_yaml(config))
        request = {
            "config": str(file),
            "topology": topology,
            "lengths": dataclasses.asdict(lengths),
            "total_updates": total_updates,
            "every_shape": every_shape or save is not None,
            "save": save,
            "known": list(cache),
        }
        described, found = _compile_all(request, processes, cache, report, stop_at_misfit)
    return Compilation(
        topology=topology,
        lengths=lengths,
        model=described["model"],
        facts=described["facts"],
        residents=described["residents"],
        programs=described["programs"],
        compiled={name: found[name] for name in described["names"] if name in found},
        seconds=time.monotonic() - start,
    )


def _compile_all(
    request: dict[str, Any], processes: int, cache: dict[str, Compiled], report: Report, stop_at_misfit: bool
) -> tuple[dict[str, Any], dict[str, Compiled]]:
    """The run's description, and its programs by name: each process takes the next one until none is left."""
    found: dict[str, Compiled] = {}
    workers = [Worker(request) for _ in range(processes)]
    waiting: deque[str] = deque()

    def take(worker: Worker, count: int) -> None:
        while True:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            with report(f"compiling {name} ({count - len(waiting)} of {count})"):
                answer = worker.compile(name)
            if answer["kind"] == "known":
                found[name] = dataclasses.replace(cache[answer["key"]], name=name)
            else:
                found[name] = _compiled(answer)
            if answer["kind"] == "compiled":
                cache[answer["key"]] = found[name]
            if stop_at_misfit and found[name].status != "compiled":
                waiting.clear()
            if answer["kind"] == "died" and waiting:
                worker = Worker(request)
                workers.append(worker)

    try:
        with report("reading the model"):
            described = workers[0].description
        waiting.extend(described["names"])
        with ThreadPoolExecutor(processes) as threads:
            try:
                count = len(described["names"])
                jobs = [threads.submit(take, worker, count) for worker in workers]
                for job in as_completed(jobs):
                    job.result()
            except BaseException:
                waiting.clear()
                for worker in workers:
                    worker.close()
                raise
    finally:
        for worker in workers:
            worker.close()
    return described, found


def _compiled(answer: dict[str, Any]) -> Compiled:
    fields = {f.name: answer[f.name] for f in dataclasses.fields(Compiled) if f.name in answer}
    return Compiled(**{**fields, "largest": tuple((what, size) for what, size in answer["largest"])})
