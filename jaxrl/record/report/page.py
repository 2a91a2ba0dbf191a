"""The HTML of a report.

The page loads nothing from anywhere and runs no script. What comes from a run (prompts, completions, names,
config) is untrusted text and is escaped.
"""

from __future__ import annotations

import datetime
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import yaml

from jaxrl.record.metrics import sample_files
from jaxrl.record.report import drawing, plots
from jaxrl.record.report.run import Curves, Run, read_rows

SHOWN_PROMPTS, SHOWN_COMPLETIONS, SHOWN_CHARACTERS = 3, 4, 4000
"""Per step on the page: prompts, completions of each, characters of each text."""


def escape(value: Any) -> str:
    """Untrusted text for HTML; control characters become visible."""
    text = str(value).translate({c: 0x2400 + c for c in range(32) if chr(c) not in "\n\t"})
    return html.escape(text, quote=True)


def duration(seconds: float) -> str:
    """``3725`` -> ``1 h 02 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def facts(run: Run) -> list[tuple[str, str, str]]:
    """(label, value, small print) of what people ask about a run first."""
    facts = []
    for metric, label in (("eval/pass_at_1", "Held-out pass@1"), ("rollout/pass_at_1", "Training pass@1")):
        if pair := run.first_last(metric):
            change = (pair[1] - pair[0]) * 100
            facts.append((label, f"{pair[0]:.1%} → {pair[1]:.1%}", f"{change:+.1f} points"))
    if pair := run.first_last("reward/mean"):
        facts.append(("Reward", f"{pair[0]:.3f} → {pair[1]:.3f}", "first and last tenth of the steps"))
    elif pair := run.first_last("loss/policy"):
        facts.append(("Loss", f"{pair[0]:.3f} → {pair[1]:.3f}", "first and last tenth of the steps"))
    last = int(run.curves.steps[-1])
    seconds = run.seconds()
    facts.append(("Steps", f"{last:,}", f"{seconds / max(1, last):.1f} s per step"))
    segments = ", ".join(str(step) for step in run.curves.resumed)
    facts.append(
        ("Time in steps", duration(seconds), f"resumed after step {segments}" if segments else "one segment")
    )
    for phase, label in (("rollout", "Tokens sampled"), ("update", "Tokens computed")):
        spent = float(run.curves.get(f"time/{phase}_seconds")[1].sum())
        if (tokens := run.tokens(phase)) and spent > 0:
            rate = tokens / spent
            facts.append((label, _count(tokens), f"{_count(rate)} per second of {phase}"))
    _, peak = run.curves.get("memory/peak_bytes")
    if peak.size:
        facts.append(("Peak memory", f"{peak.max() / 2**30:.2f} GiB", "device, or process on CPU"))
    return facts


def _count(number: float) -> str:
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{suffix}"
    return f"{number:.0f}"


def render(runs: Sequence[Run], curves: Sequence[Curves]) -> str:
    """The page of one run or several; ``curves`` are theirs, under the names to show."""
    title = " · ".join(run.name for run in runs)
    several = len(runs) > 1
    body = [
        f"<header><h1>{escape(title if not several else f'{len(runs)} runs')}</h1>{_subtitle(runs)}</header>"
    ]
    body.append(_compare(runs) if several else tiles(facts(runs[0])))
    body += _plot_sections(runs, curves)
    for run in runs:
        body.append(_samples(run, several))
    for run in runs:
        body.append(_config(run, several))
    body.append(_environment(runs))
    return document(title, "\n".join(body))


def document(title: str, body: str) -> str:
    """A self-contained page; ``body`` is HTML."""
    light, dark = (drawing.css_variables(palette) for palette in (drawing.LIGHT, drawing.DARK))
    style = _STYLE.replace("LIGHT", light).replace("DARK", dark)
    return _TEMPLATE.format(title=escape(title), style=style, body=body)


def _subtitle(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f'<p class="keys">{"".join(_key(i, run.name) for i, run in enumerate(runs))}</p>'
    run = runs[0]
    parts = [str(run.environment.get("devices", ""))]
    if np.isfinite(run.times).any():
        start = datetime.datetime.fromtimestamp(float(np.nanmin(run.times)), datetime.UTC)
        parts.append(f"{start:%Y-%m-%d %H:%M} UTC")
    if run.curves.resumed:
        parts.append("dotted lines: the run was resumed here")
    return f"<p>{escape(' · '.join(part for part in parts if part))}</p>"


def _key(i: int, name: str) -> str:
    return f'<span><i style="background:var(--c{i % len(drawing.LIGHT.lines)})"></i>{escape(name)}</span>'


def tiles(facts: Iterable[tuple[str, str, str]]) -> str:
    """(label, value, small print) as a row of tiles."""
    found = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd><small>{escape(small)}</small></div>"
        for label, value, small in facts
    )
    return f'<dl class="tiles">{found}</dl>'


def _compare(runs: Sequence[Run]) -> str:
    """A table of the facts of several runs, and of the settings in which they differ."""
    by_run = [{label: (value, small) for label, value, small in facts(run)} for run in runs]
    labels = list(dict.fromkeys(label for facts in by_run for label in facts))
    head = "".join(f"<th>{_key(i, run.name)}</th>" for i, run in enumerate(runs))

    def cell(facts: Mapping[str, tuple[str, str]], label: str) -> str:
        value, small = facts.get(label, ("-", ""))
        return f"<td>{escape(value)} <small>{escape(small)}</small></td>"

    rows = [f"<tr><th>{escape(n)}</th>{''.join(cell(facts, n) for facts in by_run)}</tr>" for n in labels]
    configs = [_flat(_parsed_config(run)) for run in runs]
    for key in sorted({key for config in configs for key in config}):
        found = [config.get(key, "-") for config in configs]
        if any(value != found[0] for value in found):
            cells = "".join(f"<td><code>{escape(value)}</code></td>" for value in found)
            rows.append(f"<tr><th><code>{escape(key)}</code></th>{cells}</tr>")
    return f'<div class="wide"><table class="compare"><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def _parsed_config(run: Run) -> Any:
    if run.config_file is None or run.config_file.suffix == ".gin":
        return {}
    try:
        return yaml.safe_load(run.config_file.read_text(encoding="utf-8", errors="replace"))
    except yaml.YAMLError:
        return {}


def _flat(tree: Any, prefix: str = "") -> dict[str, str]:
    if not isinstance(tree, Mapping):
        return {prefix: json.dumps(tree, default=str)} if prefix else {}
    flat: dict[str, str] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _plot_sections(runs: Sequence[Run], curves: Sequence[Curves]) -> list[str]:
    drawn: set[str] = set()
    sections: dict[str, list[str]] = {}
    for plot in plots.PLOTS:
        if lines := plot.find(curves):
            drawn |= {name for name, _ in lines} | {plot.spread}
            sections.setdefault(plot.section, []).append(_figure(plot, runs, curves))
    out = [
        f'<h2>{title}</h2><div class="plots">{"".join(figures)}</div>' for title, figures in sections.items()
    ]
    shown_elsewhere = drawn | {"time/step_seconds"}
    names = sorted({n for c in curves for n in c.values if n not in shown_elsewhere and c.get(n)[0].size})
    others = [_other_plot(name) for name in names]
    if others:
        figures = "".join(_figure(plot, runs, curves) for plot in others)
        title = f"Other metrics ({len(others)})"
        out.append(f'<details><summary>{title}</summary><div class="plots">{figures}</div></details>')
    return out


def _other_plot(name: str) -> plots.Plot:
    """A plot of a metric that no plot of the table shows; a user's own, for example."""
    form: Any = "percent" if name.endswith("_fraction") else "number"
    unit = "seconds" if name.endswith("_seconds") else ""
    pattern = re.escape(name)
    return plots.Plot(key=name, title=name, section="", lines=((pattern, "value"),), form=form, unit=unit)


def _figure(plot: plots.Plot, runs: Sequence[Run], curves: Sequence[Curves]) -> str:
    change, note = "", plot.note
    (name, label), *more = plot.find(curves)
    if len(runs) == 1 and plot.kind == "events":
        change = f"<span>{runs[0].curves.get(name)[1].sum():,.0f} in all</span>"
    elif len(runs) == 1 and plot.kind == "lines" and (pair := runs[0].first_last(name)):
        first, last = (drawing.text(value, plot) for value in pair)
        what = f"{label} " if more else ""
        change = f"<span>{escape(what + (f'{first} → {last}' if first != last else last))}</span>"
    elif len(runs) == 1 and plot.kind == "stack":
        note = _shares(plot, curves[0])
    elif len(runs) > 1 and plot.kind in ("stack", "phases"):
        note = "The median step of each run."
    note = f"<p>{escape(note)}</p>" if note else ""
    return (
        f'<figure id="plot-{escape(plot.key)}"><figcaption><h3>{escape(plot.title)}</h3>{change}</figcaption>'
        f"{drawing.svg(plot, curves)}{note}</figure>"
    )


def _shares(plot: plots.Plot, curves: Curves) -> str:
    """The share of each phase in all the time."""
    _, stack = drawing.layers(plot, curves, most=99)
    total = sum(seconds.sum() for seconds in stack.values()) or 1.0
    shares = sorted(((seconds.sum() / total, label) for label, seconds in stack.items()), reverse=True)
    return (
        "Share of the time: "
        + ", ".join(f"{label} {share:.1%}" for share, label in shares if share > 0)
        + "."
    )


def _samples(run: Run, named: bool) -> str:
    """Samples of the first, the middle and the last step that has any."""
    files = list(sample_files(run.path).items())
    chosen = sorted({0, len(files) // 2, len(files) - 1}) if files else []
    parts = []
    for i in chosen:
        step, path = files[i]
        if rows := read_rows(path):
            opened = " open" if i == chosen[-1] and not named else ""
            parts.append(f"<details{opened}><summary>Step {step}</summary>{_sample_table(rows)}</details>")
    title = f"Samples of {escape(run.name)}" if named else "Samples"
    return f"<h2>{title}</h2>{''.join(parts)}" if parts else ""


def _sample_table(rows: Sequence[Mapping[str, Any]]) -> str:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row.get("prompt", "")), []).append(row)
    out = []
    for prompt, group in list(groups.items())[:SHOWN_PROMPTS]:
        cells = []
        for row in group[:SHOWN_COMPLETIONS]:
            length = (
                f"{escape(row.get('length', '-'))}<br><small>{escape(row.get('stop_reason', ''))}</small>"
            )
            shown = (_pre(row.get("completion", "")), _answer(row), _rewards(row), length)
            cells.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in shown)}</tr>")
        out.append(
            f'<div class="sample"><div class="prompt"><b>Prompt</b>{_pre(prompt)}</div>'
            "<table><tr><th>Completion</th><th>Answer</th><th>Reward</th><th>Tokens</th></tr>"
            f"{''.join(cells)}</table></div>"
        )
    return "".join(out)


def _pre(text: Any) -> str:
    text = str(text)
    cut = len(text) - SHOWN_CHARACTERS
    half = SHOWN_CHARACTERS // 2
    if cut > 0:
        text = f"{text[:half]} [... {cut} characters ...] {text[-half:]}"
    return f"<pre>{escape(text)}</pre>"


def _answer(row: Mapping[str, Any]) -> str:
    answer = row.get("answer")
    return "<small>none</small>" if answer is None else f"<code>{escape(str(answer)[:200])}</code>"


def _rewards(row: Mapping[str, Any]) -> str:
    total = row.get("reward")
    shown = f"<b>{total:.3g}</b>" if isinstance(total, int | float) else "<small>abstained</small>"
    parts = row.get("rewards")
    if isinstance(parts, Mapping):
        for name, value in parts.items():
            number = f"{value:.3g}" if isinstance(value, int | float) else "-"
            shown += f"<br><small>{escape(name)} {number}</small>"
    return shown


def _config(run: Run, named: bool) -> str:
    if run.config_file is None:
        return ""
    title = f"Config of {escape(run.name)}" if named else "Config"
    text = run.config_file.read_text(encoding="utf-8", errors="replace")
    title += f" <small>{run.config_file.name}</small>"
    return f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>"


def _environment(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        rows = [
            (name, run.environment[name])
            for name in ("devices", "processes", "system")
            if name in run.environment
        ]
        versions = run.environment.get("versions")
        rows += list(versions.items()) if isinstance(versions, Mapping) else []
        table = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
        log = "".join(f"<tr><th>{escape(_when(e))}</th><td>{escape(_event(e))}</td></tr>" for e in run.events)
        title = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        if rows or log:
            parts.append(f'{title}<div class="pair"><table>{table}</table><table>{log}</table></div>')
    return f"<details><summary>Versions and events</summary>{''.join(parts)}</details>" if parts else ""


def _when(event: Mapping[str, Any]) -> str:
    moment = event.get("time")
    if not isinstance(moment, int | float):
        return ""
    return f"{datetime.datetime.fromtimestamp(moment, datetime.UTC):%Y-%m-%d %H:%M:%S}"


def _event(event: Mapping[str, Any]) -> str:
    hidden = ("event", "time", "versions", "devices", "processes", "system")
    fields = " ".join(f"{name}={value}" for name, value in event.items() if name not in hidden)
    return f"{event['event']} {fields}"


_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

_STYLE = """
:root{--bg:#f6f8fa;--card:#fff;--text:#1f2328;--line:#d8dee4;LIGHT}
@media (prefers-color-scheme:dark){:root{--bg:#0d1117;--card:#161b22;--text:#e6edf3;--line:#2b323a;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text)}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1360px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;margin:36px 0 12px}
h3{font-size:14px;margin:0}
header p{margin:4px 0 20px;color:var(--ink)}
small,figure p,figcaption span,dt{color:var(--ink)}
small{font-size:12px}
code,pre{font:12.5px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:12px;margin:0}
.tiles>div,figure,details,.compare{background:var(--card);border:1px solid var(--line);border-radius:8px}
.tiles>div{padding:12px 16px}
dt{font-size:13px}
dd{margin:2px 0 0;font-size:20px;font-weight:600;font-variant-numeric:tabular-nums}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(400px,100%),1fr));gap:16px}
figure{margin:0;padding:14px 16px 10px}
figcaption{display:flex;justify-content:space-between;gap:12px;align-items:baseline;margin-bottom:4px}
figcaption span{font-size:13px;font-variant-numeric:tabular-nums;white-space:nowrap}
figure p{margin:2px 0 0;font-size:12.5px}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-family:inherit!important}
.keys span,.compare span{display:inline-flex;align-items:center;margin-right:18px}
.keys i,.compare i{width:12px;height:12px;border-radius:3px;margin-right:7px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;vertical-align:top;padding:7px 12px;border-top:1px solid var(--line)}
tr:first-child>*{border-top:0}
th{font-weight:600}
td{font-variant-numeric:tabular-nums}
details{margin:12px 0;overflow:hidden}
summary{cursor:pointer;padding:11px 16px;font-weight:600}
details>pre,details>.plots,details>.pair{margin:0;padding:12px 16px;border-top:1px solid var(--line)}
details figure{border:0;padding:6px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(320px,1fr));gap:24px;align-items:start}
@media(max-width:700px){.tiles{grid-template-columns:repeat(2,1fr)}dd{font-size:16px}}
.sample{border-top:1px solid var(--line)}
.prompt{padding:10px 16px;background:var(--bg)}
.prompt b{font-size:12px;color:var(--ink)}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;max-height:340px;overflow-y:auto}
.sample th{font-size:12px;color:var(--ink)}
.sample th:nth-child(2){width:16%}
.sample th:nth-child(3){width:16%}
.sample th:nth-child(4){width:9%}
.sample td:first-child,.sample th:first-child{padding-left:16px}
"""
