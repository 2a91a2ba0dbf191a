"""Memory that a run needs: for each phase, what is in the memory of one device at its worst moment.

A program needs what its buffer assignment says (its arguments among it), and beside it all that ``train``
keeps on the device and does not hand to it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from jaxrl.compile.program import PHASES
from jaxrl.compile.tpu import chip_of
from jaxrl.planner.compile import Compilation, Compiled

TEMPORARIES, OTHER = "temporaries", "other arguments"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase at the moment that needs most."""

    name: str
    program: str
    """That runs then."""
    parts: Mapping[str, int]
    """Bytes by kind of resident, and of what else the program is given and makes."""
    known: bool
    """False: the program ran out of memory, or failed, and the compiler did not say what it needs."""

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """All phases that a run has, in the order of a step."""

    phases: tuple[Phase, ...]
    hbm_bytes: int
    host_bytes: Mapping[str, int]
    """By resident, what rests in host memory for one device."""

    @property
    def fits(self) -> bool:
        return all(p.known and p.total_bytes <= self.hbm_bytes for p in self.phases)

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=lambda p: (not p.known, p.total_bytes))

    @property
    def free_bytes(self) -> int:
        """Bytes that the worst phase leaves; negative: that it lacks."""
        return self.hbm_bytes - self.worst.total_bytes


def largest(c: Compilation, phase: Phase, most: int = 8) -> list[tuple[str, int]]:
    """(what, bytes) of the largest arrays of a phase: resident ones, and what its program makes."""
    listed = next(p for p in c.programs if p["name"] == phase.program)
    found = [(what, size) for what, size in c.compiled[listed["executable"]].largest if size]
    for r in c.residents:
        if _alive(r, listed):
            found += [(f"{r['name']}: {what}", size) for what, size in r["largest"]]
    return sorted(found, key=lambda item: -item[1])[:most]


def ledger(c: Compilation) -> Ledger:
    """Add up what ``compile_run`` found."""
    phases: dict[str, Phase] = {}
    for listed in c.programs:
        compiled = c.compiled.get(listed["executable"])
        if compiled is None:
            continue
        phase = _phase(c, listed, compiled)
        before = phases.get(phase.name)
        if before is None or (phase.known, -phase.total_bytes) < (before.known, -before.total_bytes):
            phases[phase.name] = phase
    return Ledger(
        phases=tuple(phases[name] for name in PHASES if name in phases),
        hbm_bytes=chip_of(c.topology).hbm_bytes,
        host_bytes={r["name"]: r["host_bytes"] for r in c.residents if r["host_bytes"]},
    )


def _alive(resident: Mapping, listed: Mapping) -> bool:
    """Return whether a resident lies on the devices of a program while that runs."""
    here = resident["devices"] == listed["devices"]
    return here and (not resident["phases"] or listed["phase"] in resident["phases"])


def _phase(c: Compilation, listed: Mapping, compiled: Compiled) -> Phase:
    alive = {
        r["name"]: r["device_bytes"]
        for r in c.residents
        if _alive(r, listed) and r["name"] not in listed["makes"]
    }
    given = {name: alive[name] for name in listed["reads"] if name in alive}
    others = max(0, compiled.argument_bytes - sum(given.values()))
    made = max(0, compiled.total_bytes - max(compiled.argument_bytes, sum(given.values())))
    kinds = {r["name"]: r["kind"] for r in c.residents}
    parts: Counter[str] = Counter()
    for name, size in {**alive, OTHER: others, TEMPORARIES: made}.items():
        parts[kinds.get(name, name)] += size
    return Phase(
        name=listed["phase"],
        program=listed["name"],
        parts={name: size for name, size in parts.items() if size},
        known=compiled.total_bytes > 0,
    )
