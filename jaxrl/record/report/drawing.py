"""Drawing of plots, with matplotlib.

Colours tell the lines of one run apart; with several runs colours tell the runs apart, and dashes the lines.
They are chosen to stay apart under the common forms of colour blindness. In a page they are CSS variables,
so that the reader's light or dark theme sets them; a picture has those of the light theme.
"""

from __future__ import annotations

import dataclasses
import html
import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl.record.report.plots import OVERVIEW, PHASES, PLOTS, Plot
from jaxrl.record.report.run import Curves


@dataclasses.dataclass(frozen=True)
class Palette:
    """Colours of text, of the grid and of the lines."""

    ink: str
    grid: str
    lines: tuple[str, ...]

    def colour(self, index: int) -> str:
        return self.lines[index % len(self.lines)]

    def phase(self, name: str) -> str:
        """The colour that a phase has in every plot; the last one for what is not in PHASES."""
        return self.lines[PHASES.index(name) if name in PHASES else -1]


LIGHT = Palette(
    "#57606a",
    "#e4e8ec",
    ("#0969da", "#d9660a", "#12876a", "#9a4fc4", "#a87b00", "#c8386f", "#1b91b5", "#5b6b2f", "#848d97"),
)
DARK = Palette(
    "#9aa4af",
    "#2b323a",
    ("#58a6ff", "#f0883e", "#3fc89b", "#c58cf0", "#e0b93c", "#f47fa8", "#63c8e6", "#a8bf6a", "#768390"),
)
# matplotlib wants real colours: these stand for the CSS variables and are replaced in the SVG.
_STAND_IN = Palette("#010203", "#010204", tuple(f"#0102{i:02x}" for i in range(16, 16 + len(LIGHT.lines))))


# A "$" in the name of a metric is just a "$".
_STYLE: dict[Any, Any] = {"font.family": "sans-serif", "text.parse_math": False}


def css_variables(palette: Palette) -> str:
    """The palette as CSS custom properties: --ink, --grid, --c0, --c1, ..."""
    lines = "".join(f"--c{i}:{colour};" for i, colour in enumerate(palette.lines))
    return f"--ink:{palette.ink};--grid:{palette.grid};{lines}"


def smooth(values: np.ndarray) -> np.ndarray:
    """Gaussian moving average, centred, of about a twentieth of the run. [n] -> [n]."""
    width = max(1.0, len(values) / 60)
    reach = min(int(3 * width) + 1, (len(values) - 1) // 2)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def thin(values: np.ndarray, most: int = 600) -> np.ndarray:
    """Means over bins of equal size when there are more than ``most`` values. [n] -> [m]."""
    size = -(-len(values) // most)
    return (
        values if size == 1 else np.array([values[i : i + size].mean() for i in range(0, len(values), size)])
    )


def text(value: float, plot: Plot) -> str:
    """A value of the plot for people: ``63.1%``, ``1.2 GiB``, ``0.0123``."""
    if plot.form == "percent":
        return f"{value:.1%}"
    if plot.form == "bytes":
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
    if plot.form == "count":
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def draw(ax: Any, plot: Plot, runs: Sequence[Curves], palette: Palette) -> None:
    """Draws ``plot`` of ``runs`` into matplotlib axes."""
    from matplotlib import ticker

    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(palette.grid)
    ax.tick_params(which="both", length=0, colors=palette.ink, labelsize=8)
    ax.grid(axis="y", color=palette.grid, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.margins(x=0.015)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    unit = plot.unit
    if plot.form == "bytes":
        most = max(run.get(name)[1].max(initial=0) for run in runs for name, _ in plot.find(runs))
        size, unit = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
        runs = [run.scaled(1 / size) for run in runs]
    if len(runs) > 1 and plot.kind == "phases":
        _draw_bars(ax, plot, runs, palette)
    else:
        drawers = {"lines": _draw_lines, "events": _draw_events, "stack": _draw_stack, "phases": _draw_lines}
        drawers[plot.kind](ax, plot, runs, palette)
    if len(runs) == 1 or plot.kind not in ("stack", "phases"):
        ax.set_xlabel("step", color=palette.ink, fontsize=8, loc="right", labelpad=1)
    _format_values(ax, plot)
    ax.text(0, 1.04, unit, transform=ax.transAxes, color=palette.ink, fontsize=8, va="bottom")
    for step in runs[0].resumed if len(runs) == 1 else ():
        ax.axvline(step + 0.5, color=palette.ink, linewidth=0.9, linestyle=(0, (2, 3)))


def _format_values(ax: Any, plot: Plot) -> None:
    """Few, round ticks, and a floor of 0 where a value cannot be negative and 0 means something."""
    from matplotlib import ticker

    low, high = ax.get_ylim()
    if ax.get_yscale() == "log":
        subs = (1.0,) if high > 100 * low else (1.0, 2.0, 5.0)
        ax.yaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=6))
        ax.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        integer = plot.kind == "events"
        ax.yaxis.set_major_locator(ticker.MaxNLocator(5, integer=integer, steps=[1, 2, 2.5, 5, 10]))
        if plot.floor:
            lowest = float(ax.dataLim.y0)  # without the margin
            ax.set_ylim(min(lowest, 0.0), max(high, 0.02 if plot.form == "percent" else 0.0))
    formats = {
        "percent": ticker.FuncFormatter(lambda value, _: f"{100 * value:.3g}%"),
        "count": ticker.EngFormatter(sep=""),
    }
    plain = ticker.FuncFormatter(lambda value, _: f"{value:.3g}")
    ax.yaxis.set_major_formatter(formats.get(plot.form, plain))


def _legend(ax: Any, handles: list[Any], palette: Palette, **style: Any) -> None:
    ax.legend(
        handles=handles,
        frameon=False,
        fontsize=8,
        labelcolor=palette.ink,
        handletextpad=0.4,
        borderaxespad=0.1,
        loc="lower right",
        bbox_to_anchor=(1.01, 1.0),
        ncols=6,
        **({"handlelength": 1.3, "columnspacing": 1.0} | style),
    )


def _draw_lines(ax: Any, plot: Plot, runs: Sequence[Curves], palette: Palette) -> None:
    from matplotlib.lines import Line2D

    lines = _phases(plot, runs) if plot.kind == "phases" else plot.find(runs)
    dashes: list[Any] = ["-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5))]
    handles = []
    if plot.scale == "log" and any((run.get(name)[1] > 0).any() for run in runs for name, _ in lines):
        ax.set_yscale("log")
    for i, (name, label) in enumerate(lines):
        dash: Any = dashes[i % len(dashes)] if len(runs) > 1 else "-"
        own = palette.phase(label) if plot.kind == "phases" else palette.colour(i)
        colour = palette.ink if len(runs) > 1 else own
        handles.append(Line2D([], [], color=colour, linestyle=dash, linewidth=1.8, label=label))
        for r, run in enumerate(runs):
            steps, values = run.get(name)
            if plot.scale == "log":
                steps, values = steps[values > 0], values[values > 0]
            if not steps.size:
                continue
            colour = palette.colour(r) if len(runs) > 1 else own
            _draw_line(ax, steps, values, colour, dash, exact=plot.exact)
            if plot.spread in run.values and i == 0:
                spread = run.values[plot.spread][np.isin(run.steps, steps)]
                alpha = 0.13 if len(runs) == 1 else 0.05
                middle = smooth(values) if len(steps) >= 30 else values
                band = np.nan_to_num(smooth(spread) if len(steps) >= 30 else spread)
                ax.fill_between(steps, middle - band, middle + band, color=colour, alpha=alpha, linewidth=0)
    if len(lines) > 1:
        _legend(ax, handles, palette)


def _draw_line(
    ax: Any, steps: np.ndarray, values: np.ndarray, colour: str, dash: Any, *, exact: bool
) -> None:
    """Many points: the values faint, their moving average on top. Few: a line with dots."""
    if exact:
        ax.plot(thin(steps), thin(values), color=colour, linestyle=dash, linewidth=1.9)
        return
    if len(steps) < 30:
        ax.plot(steps, values, color=colour, linestyle=dash, linewidth=1.8, marker="o", markersize=3.2)
        return
    ax.plot(thin(steps), thin(values), color=colour, linewidth=0.8, alpha=0.3)
    ax.plot(thin(steps), thin(smooth(values)), color=colour, linestyle=dash, linewidth=1.9)


def _draw_events(ax: Any, plot: Plot, runs: Sequence[Curves], palette: Palette) -> None:
    """Counts that are mostly 0: a needle where they are not."""
    name = plot.find(runs)[0][0]
    for r, run in enumerate(runs):
        steps, values = run.get(name)
        found = values != 0
        if steps.size:
            ax.plot(steps[[0, -1]], [0, 0], color=palette.colour(r), linewidth=1.4, clip_on=False)
        ax.vlines(steps[found], 0, values[found], color=palette.colour(r), linewidth=1.4)
        ax.plot(steps[found], values[found], "o", color=palette.colour(r), markersize=4)
    ax.set_ylim(0, max(1.0, ax.get_ylim()[1]))


def _phases(plot: Plot, runs: Sequence[Curves]) -> list[tuple[str, str]]:
    """Phases in their fixed order, unknown ones behind."""
    order = {name: i for i, name in enumerate(PHASES)}
    return sorted(plot.find(runs), key=lambda line: (order.get(line[1], len(order)), line[1]))


def layers(plot: Plot, run: Curves, most: int = 5) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(steps [n], phase -> seconds [n]) of the ``most`` longest phases; "other" is the rest of the step."""
    phases = [line for line in _phases(plot, [run])]
    measured = np.any([np.isfinite(run.values[name]) for name, _ in phases], axis=0)
    found = {label: np.nan_to_num(run.values[name][measured]) for name, label in phases}
    longest = sorted(found, key=lambda label: -found[label].sum())[:most]
    shown = {label: seconds for label, seconds in found.items() if label in longest}
    every = np.sum(list(found.values()), axis=0)
    step = np.nan_to_num(run.values.get("time/step_seconds", np.zeros(len(measured)))[measured])
    rest = np.maximum(step, every) - np.sum(list(shown.values()), axis=0)
    return run.steps[measured], {**shown, "other": np.maximum(rest, 0)}


def _draw_stack(ax: Any, plot: Plot, runs: Sequence[Curves], palette: Palette) -> None:
    """Phases on top of each other; of several runs, one bar each.

    Spikes far above the rest (compilation in the first step) are cut, and named.
    """
    from matplotlib.patches import Patch

    labels: list[str] = []
    for place, run in enumerate(runs):
        if not plot.find([run]):
            continue
        steps, stack = layers(plot, run)
        if len(runs) > 1:
            stack = {label: seconds for label, seconds in stack.items() if np.median(seconds) > 0}
        labels += [label for label in stack if label not in labels]
        if len(runs) > 1:
            bottom = 0.0
            for label, seconds in stack.items():
                ax.bar(place, np.median(seconds), 0.6, bottom, color=palette.phase(label), alpha=0.85)
                bottom += float(np.median(seconds))
        else:
            _draw_areas(ax, steps, stack, palette)
    labels.sort(key=[*PHASES, "other"].index)
    handles = [Patch(color=palette.phase(label), alpha=0.85, label=label) for label in labels]
    _legend(ax, handles, palette, handlelength=0.9, columnspacing=0.8)
    if len(runs) > 1:
        ax.set_xticks(range(len(runs)), [run.name[:14] for run in runs])
        ax.set_xlim(-0.7, len(runs) - 0.3)


def _draw_areas(ax: Any, steps: np.ndarray, stack: dict[str, np.ndarray], palette: Palette) -> None:
    edges = np.append(thin(steps, 200) - 0.5, steps[-1] + 0.5)
    tops = np.cumsum([np.append(t := thin(seconds, 200), t[-1]) for seconds in stack.values()], axis=0)
    for low, high, label in zip([0 * edges, *tops], tops, stack, strict=False):
        ax.fill_between(edges, low, high, step="post", color=palette.phase(label), alpha=0.85, linewidth=0)
    total = np.sum(list(stack.values()), axis=0)
    usual = 1.35 * float(np.percentile(tops[-1], 95))
    ax.set_ylim(0, float(tops[-1].max()) * 1.02 or 1.0)
    if 0 < usual < tops[-1].max() / 1.6:
        ax.set_ylim(0, usual)
        cut = f"cut: step {steps[total.argmax()]}, {total.max():.0f} s"
        ax.text(0.99, 0.96, cut, transform=ax.transAxes, color=palette.ink, fontsize=8, ha="right", va="top")


def _draw_bars(ax: Any, plot: Plot, runs: Sequence[Curves], palette: Palette) -> None:
    """Several runs: bars of the median step of each, by phase."""
    phases = _phases(plot, runs)
    width = 0.8 / len(runs)
    places = np.arange(len(phases))
    for r, run in enumerate(runs):
        medians = [float(np.median(v)) if (v := run.get(name)[1]).size else 0.0 for name, _ in phases]
        ax.bar(places + (r - (len(runs) - 1) / 2) * width, medians, width * 0.92, color=palette.colour(r))
    ax.set_xticks(places, [label for _, label in phases])


def svg(plot: Plot, runs: Sequence[Curves]) -> str:
    """The plot as an SVG element for a page: fluid width, CSS variables as colours, text as text."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE | {"svg.fonttype": "none", "svg.hashsalt": plot.key}):
        figure = Figure(figsize=(4.8, 2.35))
        ax = figure.subplots()
        draw(ax, plot, runs, _STAND_IN)
        figure.subplots_adjust(left=0.105, right=0.985, top=0.87, bottom=0.145)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    source = buffer.getvalue()
    source = source[source.index("<svg") :]
    source = re.sub(r"<metadata>.*?</metadata>\s*", "", source, flags=re.DOTALL)
    source = re.sub(r'<g id="[^"]*"', "<g", source)
    source = re.sub(r'(<svg\b[^>]*?)\s+width="[^"]*"', r"\1", source, count=1)
    source = re.sub(r'(<svg\b[^>]*?)\s+height="[^"]*"', r"\1", source, count=1)
    names = dict(zip(_STAND_IN.lines, (f"var(--c{i})" for i in range(len(LIGHT.lines))), strict=True))
    names |= {_STAND_IN.ink: "var(--ink)", _STAND_IN.grid: "var(--grid)"}
    source = re.sub("|".join(names), lambda match: names[match[0]], source)
    return source.replace("<svg", f'<svg role="img" aria-label="{html.escape(plot.title)}"', 1)


def picture(runs: Sequence[Curves], columns: int = 3) -> bytes:
    """The main plots of the runs on one PNG, for a README."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    by_key = {plot.key: plot for plot in PLOTS}
    plots = [by_key[key] for key in OVERVIEW if by_key[key].find(runs)]
    rows = max(1, -(-len(plots) // columns))
    with matplotlib.rc_context(_STYLE):
        height = 2.75 * rows + (0.3 if len(runs) > 1 else 0)
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
        figure = Figure(figsize=(4.6 * columns, height), layout=layout)
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for ax, plot in zip(axes, plots, strict=False):
            draw(ax, plot, runs, LIGHT)
            ax.set_title(plot.title, loc="left", fontsize=10.5, fontweight="bold", color="#1f2328", pad=18)
        for ax in axes[len(plots) :]:
            ax.set_visible(False)
        if len(runs) > 1:
            handles = [
                Line2D([], [], color=LIGHT.lines[i % len(LIGHT.lines)], linewidth=2, label=run.name)
                for i, run in enumerate(runs)
            ]
            figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=10)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130, facecolor="white")
    return buffer.getvalue()
