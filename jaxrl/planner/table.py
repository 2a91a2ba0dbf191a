"""A plan as tables for a terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxrl.compile.tpu import chip_of
from jaxrl.ops.axes import BATCH_AXES, TENSOR
from jaxrl.ops.chip import GIB
from jaxrl.planner.advice import Change
from jaxrl.planner.compile import Compilation
from jaxrl.planner.cost import LEFT_OUT, Estimate, Usage
from jaxrl.planner.ledger import Ledger, Phase, largest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is known of one run on one topology."""

    name: str
    """Name of the run."""
    compilation: Compilation
    ledger: Ledger
    estimate: Estimate
    changes: tuple[Change, ...]
    price_per_chip_hour: float | None

    @property
    def verdict(self) -> str:
        """One line."""
        failed, found = self.compilation.failed, self.ledger
        if failed:
            return f"compiler failed: {', '.join(c.name for c in failed)}"
        worst = found.worst
        if not worst.known:
            return f"does not fit: {worst.program} needs more memory than the compiler could count"
        if found.fits:
            return f"fits: {gib(found.free_bytes)} of {gib(found.hbm_bytes)} GiB stay free in {worst.name}"
        return f"does not fit: {worst.name} lacks {gib(-found.free_bytes)} of {gib(found.hbm_bytes)} GiB"

    def as_json(self) -> dict[str, Any]:
        """JSON-able; bytes and seconds as numbers."""
        found, cost = self.ledger, self.estimate
        return {
            "name": self.name,
            "topology": self.compilation.topology,
            "model": self.compilation.model,
            "verdict": self.verdict,
            "fits": found.fits and not self.compilation.failed,
            "facts": dict(self.compilation.facts),
            "assumed": dataclasses.asdict(self.compilation.lengths),
            "hbm_bytes": found.hbm_bytes,
            "host_bytes": dict(found.host_bytes),
            "phases": [
                {
                    "name": p.name,
                    "program": p.program,
                    "total_bytes": p.total_bytes,
                    "known": p.known,
                    "parts": dict(p.parts),
                }
                for p in found.phases
            ],
            "programs": {
                name: {
                    "status": x.status,
                    "message": x.message,
                    "compile_seconds": x.seconds,
                    "total_bytes": x.total_bytes,
                    "argument_bytes": x.argument_bytes,
                    "largest": [list(b) for b in x.largest],
                    "calls_per_step": cost.programs[name][0] if name in cost.programs else 0,
                    "per_step": dataclasses.asdict(cost.programs[name][1]) if name in cost.programs else None,
                }
                for name, x in self.compilation.compiled.items()
            },
            "changes": [dataclasses.asdict(x) for x in self.changes],
            "seconds_per_step": cost.seconds,
            "tokens_per_second_per_chip": cost.tokens_per_second_per_chip if cost.new_tokens else None,
            "chips": cost.chips,
            "chip_hours": cost.chip_hours,
            "money": money(self),
            "left_out": LEFT_OUT,
            "plan_seconds": self.compilation.seconds,
        }


def gib(size: float) -> str:
    """Bytes as GiB, for people."""
    return f"{size / GIB:.2f}"


def amount(x: float) -> str:
    """Three digits, or all before the point."""
    return f"{x:,.3g}" if x < 100 else f"{x:,.0f}"


def span(low_high: tuple[float, float], form: str = "{:.3g}") -> str:
    """``12 to 15``, or one number where they are the same."""
    low, high = (form.format(x) for x in low_high)
    return low if low == high else f"{low} to {high}"


def money(plan: Plan) -> tuple[float, float] | None:
    """(least, most) of the whole run."""
    hours = plan.estimate.chip_hours
    if hours is None or plan.price_per_chip_hour is None:
        return None
    return hours[0] * plan.price_per_chip_hour, hours[1] * plan.price_per_chip_hour


def show(plan: Plan, console: Console) -> None:
    """Print the plan."""
    c = plan.compilation
    mesh = " x ".join(f"{axis} {n}" for axis, n in c.facts["mesh"].items())
    size = f"{c.facts['parameters'] / 1e9:.2f} G parameters"
    console.print(f"\n[bold]{plan.name} on {c.topology}[/bold]: {c.model}, {size}")
    console.print(f"train view {mesh}{_rollout_view(c)}; figures are of one device{_device_note(c)}")
    console.print(memory_table(plan))
    console.print(_largest(plan))
    console.print(cost_table(plan))
    for line in totals(plan):
        console.print(line)
    colour = "green" if plan.ledger.fits and not c.failed else "red"
    console.print(f"\n[bold {colour}]{plan.verdict}[/bold {colour}]")
    for failed in c.failed:
        console.print(f"  {failed.name}: {failed.message[:600]}", markup=False)
    if not plan.ledger.fits and plan.changes:
        console.print(changes_table(plan))


def _rollout_view(c: Compilation) -> str:
    view = c.facts.get("rollout_mesh")
    if not view:
        return ""
    replicas = math.prod(view[axis] for axis in BATCH_AXES)
    return f", rollout view data {replicas} x tensor {view[TENSOR]}"


def _device_note(c: Compilation) -> str:
    count = chip_of(c.topology).devices_per_chip
    return f" ({count} devices a chip)" if count > 1 else ""


def memory_table(plan: Plan) -> Table:
    """Phases in columns, what is resident in rows; GiB."""
    found = plan.ledger
    table = Table(title="Memory, each phase at its worst (GiB)", title_justify="left")
    table.add_column("", no_wrap=True)
    for p in found.phases:
        table.add_column(p.name, justify="right", no_wrap=True)
    if found.host_bytes:
        table.add_column("host", justify="right")
    for name in rows(found):
        cells = [gib(p.parts[name]) if name in p.parts else "" for p in found.phases]
        table.add_row(name, *cells, *([gib(found.host_bytes.get(name, 0))] if found.host_bytes else []))
    table.add_section()
    table.add_row("[bold]sum[/bold]", *[_sum(found, p) for p in found.phases])
    table.add_row(f"free of {gib(found.hbm_bytes)}", *[_left(found, p) for p in found.phases])
    table.add_row("while it runs", *[p.program for p in found.phases])
    return table


def _sum(found: Ledger, phase: Phase) -> str:
    if not phase.known:
        return "[bold red]too much[/bold red]"
    colour = "red" if phase.total_bytes > found.hbm_bytes else "green"
    return f"[bold {colour}]{gib(phase.total_bytes)}[/bold {colour}]"


def _left(found: Ledger, phase: Phase) -> str:
    return gib(found.hbm_bytes - phase.total_bytes) if phase.known else ""


def rows(found: Ledger) -> list[str]:
    """Names of all parts, in one order for all phases."""
    names = dict.fromkeys(n for p in found.phases for n in p.parts)
    names |= dict.fromkeys(found.host_bytes)
    last = ("other arguments", "temporaries")
    return [n for n in names if n not in last] + [n for n in last if n in names]


def _largest(plan: Plan) -> Table:
    worst = plan.ledger.worst
    table = Table(title=f"Largest arrays of {worst.name}", title_justify="left")
    table.add_column("GiB", justify="right")
    table.add_column("what", overflow="fold")
    for what, size in largest(plan.compilation, worst):
        table.add_row(gib(size), escape(what))
    return table


def cost_table(plan: Plan) -> Table:
    """Programs of a step."""
    cost = plan.estimate
    moved = traffic(cost)
    table = Table(title="A step, by arithmetic on the compiled programs", title_justify="left")
    table.add_column("", no_wrap=True)
    for title in ("calls", "TFLOP", *moved, "seconds"):
        table.add_column(title, justify="right", no_wrap=True)

    def add(name: str, calls: str, u: Usage) -> None:
        cells = [amount(x) for x in (u.flops / 1e12, *(getattr(u, key) / 1e9 for key in moved.values()))]
        table.add_row(name, calls, *cells, span((u.least_seconds, u.most_seconds)))

    for name, (calls, usage) in cost.programs.items():
        add(name, f"{calls:,.4g}", usage)
    table.add_section()
    for name, usage in cost.phases.items():
        add(f"[bold]all of {name}[/bold]", "", usage)
    return table


def traffic(cost: Estimate) -> dict[str, str]:
    """Columns of what moves: title -> field of ``Usage``; other slices and host memory where there is any."""
    always = {"HBM GB": "hbm_bytes", "ICI GB": "ici_bytes"}
    some = {"DCN GB": "dcn_bytes", "host GB": "host_bytes"}
    return always | {t: key for t, key in some.items() if any(getattr(u, key) for u in cost.phases.values())}


def totals(plan: Plan) -> list[str]:
    """Lines under the table of costs."""
    cost, lengths = plan.estimate, plan.compilation.lengths
    if not cost.phases:
        return ["no estimate: nothing was compiled"]
    least, most = cost.seconds
    what = f"{lengths.prompt_tokens} prompt and {lengths.new_tokens} new tokens a sequence"
    lines = [f"a step: {span((least, most))} s, {span((3600 / most, 3600 / least))} steps an hour, if {what}"]
    if cost.concurrent:
        lines[0] += f" ({cost.concurrent} sequences at once)"
    if cost.new_tokens:
        lines.append(f"sampled tokens per second and chip: {span(cost.tokens_per_second_per_chip)}")
    if cost.chip_hours is None:
        lines.append("the run: steps is null, so the data decides; give steps=N for its chip-hours")
    else:
        line = f"the run: {cost.steps} steps, {span(cost.chip_hours)} chip-hours on {cost.chips:g} chips"
        paid = money(plan)
        price = f"; {span(paid, '{:,.2f}')} at {plan.price_per_chip_hour:g} a chip-hour" if paid else ""
        lines.append(line + price)
    lines.append(f"left out: {'; '.join(LEFT_OUT)}")
    return lines


def changes_table(plan: Plan) -> Table:
    """Print the changes that would make room."""
    lacking = -plan.ledger.free_bytes
    table = Table(title=f"What makes room in {plan.ledger.worst.name}", title_justify="left")
    for title in ("setting", "saves GiB", "enough", "note"):
        table.add_column(title)
    for x in plan.changes:
        saved = gib(x.saved_bytes) if x.exact else f"about {gib(x.saved_bytes)}"
        table.add_row(
            x.setting, saved, "yes" if x.saved_bytes >= lacking and plan.ledger.worst.known else "", x.why
        )
    return table
