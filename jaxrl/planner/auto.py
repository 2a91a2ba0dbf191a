"""``--auto``: choose how a run is split and what it keeps, by compiling the candidates that arithmetic likes.

Arithmetic (``guess.py``) ranks all candidates and leaves out what cannot fit; the best are compiled one by
one, programs that candidates have in common once. Only what compiled and fits is ever proposed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from jaxrl.compile.program import Lengths
from jaxrl.compile.tpu import chip_of, num_devices, split_topology
from jaxrl.config import ConfigError, to_dict
from jaxrl.planner.compile import Compilation, Compiled, Report, compile_run
from jaxrl.planner.cost import Estimate, estimate
from jaxrl.planner.guess import Candidate, Guess, Guesser
from jaxrl.planner.ledger import Ledger, ledger
from jaxrl.planner.model import shape_of
from jaxrl.planner.table import gib, span
from jaxrl.run.settings import RunConfig

MOST_TRIED = 3
"""Limit on candidates to compile, as a multiple of the number asked for, where some do not fit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """A candidate that was compiled."""

    candidate: Candidate
    config: RunConfig
    compilation: Compilation
    ledger: Ledger
    estimate: Estimate

    @property
    def fits(self) -> bool:
        return self.ledger.fits and not self.compilation.failed

    @property
    def seconds(self) -> float:
        """Seconds of a step, between the two extremes."""
        return sum(self.estimate.seconds) / 2


def search(
    config: RunConfig,
    topology: str,
    lengths: Lengths,
    *,
    wanted: int,
    processes: int = 2,
    report: Report,
    tell: Any = lambda tried: None,
) -> list[Tried]:
    """Candidates that were compiled, the fastest that fit first; ``wanted`` of them fit, where as many are
    found.

    Raises:
        ConfigError: nothing can fit, by arithmetic.
    """
    slice_name, slices = split_topology(topology)
    guesser = Guesser(
        config=config,
        model=shape_of(config),
        chip=chip_of(slice_name),
        devices=num_devices(topology),
        slices=slices,
        lengths=lengths,
    )
    guesses = list(guesser.all())
    if not guesses:
        raise ConfigError(f"no split of this run fits {topology}, by arithmetic: take a larger one")
    cache: dict[str, Compiled] = {}
    found: list[Tried] = []
    for guess in diverse(guesses):
        if sum(t.fits for t in found) >= wanted or len(found) >= MOST_TRIED * wanted:
            break
        chosen = applied(config, guess.candidate)
        updates = (chosen.steps or 1000) * chosen.algo.updates_per_step
        c = compile_run(
            chosen,
            topology,
            lengths=lengths,
            total_updates=updates,
            processes=processes,
            report=report,
            cache=cache,
            stop_at_misfit=True,
        )
        tried = Tried(
            candidate=guess.candidate,
            config=chosen,
            compilation=c,
            ledger=ledger(c),
            estimate=estimate(c, chosen),
        )
        found.append(tried)
        tell(tried)
    return sorted(found, key=lambda t: (not t.fits, t.seconds))


def diverse(guesses: Sequence[Guess]) -> Iterator[Guess]:
    """All guesses: first the fastest of each split of the devices, then by speed alone; of those within 2 %
    of each other, the one that needs least memory."""
    least = min(g.seconds for g in guesses)
    ranked = sorted(guesses, key=lambda g: (round(50 * g.seconds / least), g.worst_bytes))
    seen, rest = set(), []
    for guess in ranked:
        c = guess.candidate
        split = c.data, c.fsdp, c.tensor
        if split in seen:
            rest.append(guess)
        else:
            seen.add(split)
            yield guess
    yield from rest


def applied(config: RunConfig, candidate: Candidate) -> RunConfig:
    """``config`` with the candidate's settings."""
    for key, value in candidate.settings.items():
        section, name = key.split(".")
        changed = dataclasses.replace(getattr(config, section), **{name: value})
        config = dataclasses.replace(config, **{section: changed})
    return config


def frontier(tried: Sequence[Tried]) -> list[Tried]:
    """Those that fit and that no other one beats in both time and memory."""
    fit = [((t.seconds, t.ledger.worst.total_bytes), t) for t in tried if t.fits]
    return [t for figures, t in fit if not any(_beats(others, figures) for others, _ in fit)]


def _beats(a: tuple[float, int], b: tuple[float, int]) -> bool:
    return a != b and a[0] <= b[0] and a[1] <= b[1]


def overlay(config_file: str | None, out: Path, chosen: Tried, overrides: Mapping[str, Any]) -> str:
    """The text of a config file that refines ``config_file`` by the overrides of the command line and the
    chosen settings."""
    tree: dict[str, Any] = {}
    if config_file is not None:
        tree["base"] = os.path.relpath(Path(config_file).resolve(), out.parent.resolve())
    for key, value in {**overrides, **chosen.candidate.settings}.items():
        part = tree
        *sections, name = key.split(".")
        for section in sections:
            part = part.setdefault(section, {})
        part[name] = value
    room, seconds = chosen.ledger, span(chosen.estimate.seconds)
    head = (
        f"# Chosen by jaxrl.plan --auto for {chosen.compilation.topology}: {seconds} s a step, estimated;\n"
        f"# {gib(room.worst.total_bytes)} of {gib(room.hbm_bytes)} GiB in {room.worst.name}.\n"
    )
    return head + yaml.safe_dump(tree, sort_keys=False, width=100)


def given_settings(config: RunConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """The keys of ``key=value`` on the command line with their values; an item of a list is given as the
    whole list."""
    values, found = to_dict(config), {}
    for word in overrides:
        part: Any = values
        path = []
        for name in word.partition("=")[0].split("."):
            if not isinstance(part, dict) or name.isdecimal():
                break
            path.append(name)
            part = part[name] if name in part else None
        found[".".join(path)] = part
    return found


def show(tried: Sequence[Tried], console: Console) -> None:
    """The frontier of time and memory."""
    best = frontier(tried)
    table = Table(title="Candidates that were compiled", title_justify="left")
    for title in ("", "train view", "sampler", "micro-batch", "remat", "moments", "kv cache"):
        table.add_column(title)
    for title in ("s a step", "GiB", "in"):
        table.add_column(title, justify="right")
    for t in tried:
        c = t.candidate
        mark = "*" if t in best else ""
        kv = "all slots" if c.kv_cache_gib is None else f"{c.kv_cache_gib:g} GiB"
        worst = t.ledger.worst
        size = f"{gib(worst.total_bytes)}{'' if t.fits else ' too much'}" if worst.known else "too much"
        table.add_row(
            mark,
            f"data {c.data} fsdp {c.fsdp} tensor {c.tensor}",
            f"tensor {c.rollout_tensor}, {c.slots} slots",
            f"{c.micro_batch_tokens}",
            c.remat,
            c.state_memory,
            kv,
            span(t.estimate.seconds) if t.fits else "",
            size if not t.compilation.failed else "compiler failed",
            worst.name,
        )
    console.print(table)
    console.print("* no other one is both faster and smaller")
