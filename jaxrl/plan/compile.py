"""Compile the programs of a run in processes of their own, and collect what the compiler says."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.config import ConfigError, to_yaml
from jaxrl.settings import RunConfig
from jaxrl.tpu import compiler_missing, split_topology


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


class CompilerDied(Exception):
    """The compiling process ended before it had anything to say."""


Report = Callable[[str, int, int], None]
"""(what is compiled now, number, of how many)"""


def compile_run(
    config: RunConfig,
    topology: str,
    *,
    total_updates: int = 1000,
    every_shape: bool = False,
    save: str | None = None,
    report: Report = lambda *_: None,
    cache: dict[str, Compiled] | None = None,
    stop_at_misfit: bool = False,
) -> Compilation:
    """Every program of ``config`` on ``topology``; of one function in several shapes the largest, unless
    ``every_shape``. ``save``: a folder for all executables, which ``train`` can load (``executables.py``).

    Args:
        total_updates: of the run; the learning rate's schedule is part of the update.
        cache: programs that were compiled before, by what they are lowered to; new ones are put in.
        stop_at_misfit: end with the first program that does not fit by itself; the others are left out.

    Raises:
        ConfigError: there is no such topology or no compiler here, or the run cannot be put together.
    """
    split_topology(topology)
    if missing := compiler_missing():
        raise ConfigError(f"planning needs the TPU compiler: {missing}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="jaxrl-plan-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(to_yaml(config))
        request = {
            "config": str(file),
            "topology": topology,
            "total_updates": total_updates,
            "every_shape": every_shape or save is not None,
            "save": save,
            "stop_at_misfit": stop_at_misfit,
        }
        cache = {} if cache is None else cache
        report("reading the model", 0, 0)
        described: dict[str, Any] = {}
        found: dict[str, Compiled] = {}
        while not described or len(found) < len(described["names"]):
            for answer in _ask({**request, "done": list(found), "known": list(cache)}):
                if answer["kind"] == "described":
                    described = described or answer
                elif answer["kind"] == "compiling":
                    report(answer["name"], len(found) + 1, len(described["names"]))
                elif answer["kind"] == "known":
                    found[answer["name"]] = dataclasses.replace(cache[answer["key"]], name=answer["name"])
                else:
                    found[answer["name"]] = _compiled(answer)
                    if "key" in answer:
                        cache[answer["key"]] = found[answer["name"]]
            if stop_at_misfit and any(x.status != "compiled" for x in found.values()):
                break
    return Compilation(
        topology=topology,
        model=described["model"],
        facts=described["facts"],
        residents=described["residents"],
        programs=described["programs"],
        compiled=found,
        seconds=time.monotonic() - start,
    )


def _compiled(answer: dict[str, Any]) -> Compiled:
    fields = {f.name: answer[f.name] for f in dataclasses.fields(Compiled) if f.name in answer}
    return Compiled(**{**fields, "largest": tuple((what, size) for what, size in answer["largest"])})


def _ask(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A worker's answers. Where it dies over a program, {kind: died, name, ...} is the last one.

    Raises:
        ConfigError: the worker refused the config, or died before it compiled anything.
    """
    read, write = os.pipe()
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with tempfile.TemporaryFile("w+") as log, os.fdopen(read) as answers:
        worker = subprocess.Popen(
            [sys.executable, "-m", "jaxrl.plan.worker"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            pass_fds=[write],
            env=environment,
        )
        os.close(write)
        try:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps({**request, "answers": write}) + "\n")
            worker.stdin.close()
            current = None
            for line in answers:
                answer = json.loads(line)
                if answer["kind"] == "refused":
                    raise ConfigError([tuple(p) for p in answer["problems"]])
                current = answer["name"] if answer["kind"] == "compiling" else None
                yield answer
            code = worker.wait()
        finally:
            worker.kill()
            worker.wait()
        if code == 0:
            return
        log.seek(0)
        last = "\n".join(log.read().strip().splitlines()[-12:])[-2000:]
        ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        if current is None:
            raise CompilerDied(f"the compiling process ended ({ended}) before it compiled anything:\n{last}")
        message = f"the compiling process ended ({ended}): {last}"
        yield {
            "kind": "died", "name": current, "status": "failed", "message": message, "seconds": 0.0,
            "total_bytes": 0, "largest": [],
        }  # fmt: skip
