"""Seconds of a step, by arithmetic on the compiled programs.

Each program's FLOPs, bytes and wire bytes are those of its HLO (``compile.tpu.program_cost``); how often it
runs, it says itself, for assumed tokens of a prompt and of a completion. Seconds are a
roofline at the chip's published peak rates, between two extremes: computing, sending and copying to and from
host memory at once (the longest of these times) and one after the other (their sum).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl.compile.program import PHASES
from jaxrl.compile.tpu import Chip, chip_of
from jaxrl.planner.compile import Compilation
from jaxrl.run.settings import RunConfig

LEFT_OUT = (
    "the host's work: rewards and environments, tokenizing, packing, scheduling between dispatches",
    "the latency of small collectives, and contention where several share a link",
    "compilation and loading at the start, evaluation, checkpoints",
    "the tail of a rollout, when few sequences are left (lengths are taken as equal)",
    "what kernels lose against peak: real programs reach 40 to 70 % of it",
)
"""Costs that the estimate does not count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Costs of one device, in one step of training."""

    flops: float = 0.0
    hbm_bytes: float = 0.0
    ici_bytes: float = 0.0
    dcn_bytes: float = 0.0
    host_bytes: float = 0.0
    compute_seconds: float = 0.0
    """Matrix unit or HBM, whichever each operation waits for."""
    wire_seconds: float = 0.0
    host_seconds: float = 0.0
    least_seconds: float = 0.0
    """All three at once."""

    @property
    def most_seconds(self) -> float:
        """One after the other."""
        return self.compute_seconds + self.wire_seconds + self.host_seconds

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(Usage)}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """One step of training."""

    programs: Mapping[str, tuple[float, Usage]]
    """Name -> (calls a step, usage of all of them)."""
    phases: Mapping[str, Usage]
    new_tokens: int
    """Sampled in a step."""
    chips: float
    steps: int | None
    """Steps of the whole run; None: the data decides."""
    concurrent: int | None
    """Sequences that the kv cache holds at once."""

    @property
    def seconds(self) -> tuple[float, float]:
        """(least, most) of a step."""
        usages = self.phases.values()
        return sum(u.least_seconds for u in usages), sum(u.most_seconds for u in usages)

    @property
    def tokens_per_second_per_chip(self) -> tuple[float, float]:
        """(least, most) sampled tokens, over the whole step."""
        least, most = self.seconds
        return self.new_tokens / most / self.chips, self.new_tokens / least / self.chips

    @property
    def chip_hours(self) -> tuple[float, float] | None:
        """(least, most) of the whole run."""
        if self.steps is None:
            return None
        least, most = (self.steps * s * self.chips / 3600 for s in self.seconds)
        return least, most


def estimate(c: Compilation, config: RunConfig) -> Estimate:
    """Add up what ``compile_run`` found; a program that is not compiled counts nothing."""
    chip = chip_of(c.topology)
    programs: dict[str, tuple[float, Usage]] = {}
    phases: dict[str, Usage] = {}
    for listed in c.programs:
        compiled = c.compiled.get(listed["executable"])
        if compiled is None or compiled.fixed is None or compiled.once is None or not listed["calls"]:
            continue
        usage = _usage(compiled.fixed, compiled.once, listed, chip)
        programs[listed["name"]] = (listed["calls"], usage)
        phases[listed["phase"]] = phases.get(listed["phase"], Usage()) + usage
    return Estimate(
        programs=programs,
        phases={name: phases[name] for name in PHASES if name in phases},
        new_tokens=config.data.prompts_per_step * config.rollout.group_size * c.lengths.new_tokens,
        chips=c.facts["devices"] / chip.devices_per_chip,
        steps=config.steps,
        concurrent=c.facts.get("concurrent"),
    )


def _usage(
    fixed: Mapping[str, float], once: Mapping[str, float], listed: Mapping[str, Any], chip: Chip
) -> Usage:
    number, trips = listed["calls"], listed["trips"]
    total = {key: number * (fixed[key] + trips * (once[key] - fixed[key])) for key in fixed}
    attention = listed["attention_flops"] * number * trips
    empty = 1.0 - listed["filled_pages"]
    compute = total["compute_seconds"] - empty * total["page_seconds"] + attention / chip.flops_per_second
    wire = total["ici_bytes"] / chip.ici_bytes_per_second + total["dcn_bytes"] / chip.dcn_bytes_per_second
    host = total["host_bytes"] / chip.host_bytes_per_second
    return Usage(
        flops=total["flops"] + attention,
        hbm_bytes=total["hbm_bytes"] - empty * total["page_bytes"],
        ici_bytes=total["ici_bytes"],
        dcn_bytes=total["dcn_bytes"],
        host_bytes=total["host_bytes"],
        compute_seconds=compute,
        wire_seconds=wire,
        host_seconds=host,
        least_seconds=max(compute, wire, host),
    )
