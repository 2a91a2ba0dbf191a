"""A plan as one self-contained HTML page: the memory of each phase as a stacked bar."""

from __future__ import annotations

from collections.abc import Iterable

from jaxrl.planner.cost import LEFT_OUT
from jaxrl.planner.ledger import Phase, largest
from jaxrl.planner.table import Plan, amount, gib, money, rows, span, traffic
from jaxrl.record.report.page import document, escape, tiles

_STYLE = """
.bars{display:grid;grid-template-columns:max-content 1fr max-content;gap:10px 14px;align-items:center}
.bars b{font-weight:600}.bars small{display:block}
.bar{position:relative;display:flex;height:30px;background:var(--bg);border-radius:4px}
.bar i{display:block;height:100%}
.bar i:first-child{border-radius:4px 0 0 4px}
.limit{position:absolute;top:-5px;bottom:-5px;border-left:2px dashed var(--text)}
.over{color:#cf222e;font-weight:600}
.keys{margin:0 0 14px;display:flex;flex-wrap:wrap;gap:4px 0}
.right td+td,.right th+th{text-align:right}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:16px;margin:16px 0}
.card{overflow-x:auto}
"""


def render(plan: Plan) -> str:
    """The page."""
    c = plan.compilation
    body = [
        f"<style>{_STYLE}</style><header><h1>{escape(plan.name)} on {escape(c.topology)}</h1>",
        f"<p>{escape(c.model)}, {c.facts['parameters'] / 1e9:.2f} G parameters; "
        f"train view {escape(' x '.join(f'{a} {n}' for a, n in c.facts['mesh'].items()))}; "
        f"compiled in {c.seconds:.0f} s</p></header>",
        tiles(_facts(plan)),
        "<h2>Memory of a device</h2>",
        f'<div class="card">{_keys(plan)}{_bars(plan)}</div>',
        "<h2>Largest arrays</h2>",
        f'<div class="card">{_largest(plan)}</div>',
        "<h2>A step</h2>",
        f'<div class="card right">{_costs(plan)}</div>',
        f"<p><small>Left out: {escape('; '.join(LEFT_OUT))}.</small></p>",
    ]
    if not plan.ledger.fits and plan.changes:
        body += ["<h2>What makes room</h2>", f'<div class="card">{_changes(plan)}</div>']
    if c.failed:
        failures = "".join(f"<h3>{escape(f.name)}</h3><pre>{escape(f.message)}</pre>" for f in c.failed)
        body += ["<h2>Compiler failures</h2>", f'<div class="card">{failures}</div>']
    return document(f"{plan.name} on {c.topology}", "".join(body))


def _facts(plan: Plan) -> list[tuple[str, str, str]]:
    cost = plan.estimate
    found = [("Verdict", plan.verdict.partition(":")[0], plan.verdict.partition(": ")[2])]
    if cost.phases:
        least, most = cost.seconds
        lengths = plan.compilation.lengths
        assumed = f"{lengths.prompt_tokens} prompt and {lengths.new_tokens} new tokens a sequence"
        found.append(
            (
                "Steps an hour",
                span((3600 / most, 3600 / least)),
                f"a step: {span((least, most))} s; {assumed}",
            )
        )
        if cost.new_tokens:
            found.append(
                ("Sampled tokens per second and chip", span(cost.tokens_per_second_per_chip), "whole step")
            )
    if cost.phases and cost.chip_hours:
        paid = money(plan)
        small = f"{cost.steps} steps on {cost.chips:g} chips" + (
            f"; {span(paid, '{:,.2f}')} of money" if paid else ""
        )
        found.append(("Chip-hours of the run", span(cost.chip_hours), small))
    return found


def _colour(plan: Plan, part: str) -> str:
    return f"var(--c{rows(plan.ledger).index(part) % 9})"


def _keys(plan: Plan) -> str:
    spans = (
        f'<span><i style="background:{_colour(plan, n)}"></i>{escape(n)}</span>' for n in rows(plan.ledger)
    )
    return f'<p class="keys">{"".join(spans)}</p>'


def _bars(plan: Plan) -> str:
    limit = plan.ledger.hbm_bytes
    scale = max([limit, *(p.total_bytes for p in plan.ledger.phases)]) * 1.02
    return f'<div class="bars">{"".join(_bar(plan, p, scale) for p in plan.ledger.phases)}</div>'


def _bar(plan: Plan, phase: Phase, scale: float) -> str:
    limit = plan.ledger.hbm_bytes
    pieces = "".join(
        f'<i style="width:{100 * phase.parts[n] / scale:.2f}%;background:{_colour(plan, n)}" '
        f'title="{escape(n)}: {gib(phase.parts[n])} GiB"></i>'
        for n in rows(plan.ledger)
        if n in phase.parts
    )
    over = phase.total_bytes > limit or not phase.known
    total = (
        f"{gib(phase.total_bytes)} of {gib(limit)} GiB" if phase.known else "more than the compiler counts"
    )
    return (
        f"<div><b>{escape(phase.name)}</b><small>{escape(phase.program)}</small></div>"
        f'<div class="bar">{pieces}<span class="limit" style="left:{100 * limit / scale:.2f}%"></span></div>'
        f'<div class="{"over" if over else ""}">{total}</div>'
    )


def _largest(plan: Plan) -> str:
    shown = [
        (p.name, gib(size), what)
        for p in plan.ledger.phases
        for what, size in largest(plan.compilation, p, most=5)
    ]
    return _table(("phase", "GiB", "what"), shown)


def _costs(plan: Plan) -> str:
    moved = traffic(plan.estimate)
    seconds = {"compute s": "compute_seconds", "wire s": "wire_seconds"}
    seconds |= {"host s": "host_seconds"} if "host GB" in moved else {}
    head = ("program", "calls", "TFLOP", *moved, *seconds, "seconds")
    body = []
    for name, (calls, u) in [*plan.estimate.programs.items(), *_phases(plan)]:
        bytes_moved = [getattr(u, key) / 1e9 for key in moved.values()]
        numbers = [u.flops / 1e12, *bytes_moved, *(getattr(u, key) for key in seconds.values())]
        cells = [amount(x) for x in numbers]
        body.append((name, f"{calls:,.4g}" if calls else "", *cells, span((u.least_seconds, u.most_seconds))))
    return _table(head, body)


def _phases(plan: Plan) -> list:
    return [(f"all of {name}", (0, usage)) for name, usage in plan.estimate.phases.items()]


def _changes(plan: Plan) -> str:
    cells = [(x.setting, f"{'' if x.exact else 'about '}{gib(x.saved_bytes)}", x.why) for x in plan.changes]
    return _table(("setting", "saves GiB", "note"), cells)


def _table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{escape(x)}</th>" for x in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(x)}</td>' for x in line)}</tr>" for line in body)
    return f"<table><tr>{top}</tr>{lines}</table>"
