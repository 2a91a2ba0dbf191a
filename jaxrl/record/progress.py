"""The lines people watch while a run goes on: a live one on a terminal, plain text in the log of a job."""

from __future__ import annotations

import collections
import datetime
import logging
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

PLAIN_SECONDS = 30.0
"""A phase that takes longer says so in a plain log this often."""


def short(number: float) -> str:
    """``12345`` -> ``12.3k``; three digits are enough to watch."""
    for limit, divisor, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(number) >= limit:
            return f"{number / divisor:.1f}{suffix}"
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}"


WATCHED: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("reward", ("reward/mean",), "{:6.3f}".format),
    ("pass@1", ("rollout/pass_at_1",), "{:6.1%}".format),
    ("length", ("rollout/length_mean",), "{:5.0f}".format),
    ("loss", ("loss/policy",), "{:7.4f}".format),
    (
        "tok/s",
        ("throughput/rollout_tokens_per_second", "throughput/update_tokens_per_second"),
        lambda number: f"{short(number):>5}",
    ),
    ("s/step", ("time/step_seconds",), "{:5.1f}".format),
    ("held-out", ("eval/pass_at_1",), "{:.1%}".format),
)
"""Label, metrics (the first one found is shown), format. The loss is shown where there is no reward."""


class Progress:
    """Progress of a run of ``total_steps``.

    Args:
        total_steps: the last step's number.
        mode: as ``metrics.progress``: "rich" a live line, "plain" one line a step, "none", "auto": rich on a
            terminal, else plain.
        start_step: steps done before (a resumed run).
        enabled: False on all processes but the first.
        stream: where to write; standard output by default.
    """

    def __init__(
        self,
        total_steps: int,
        mode: Literal["auto", "rich", "plain", "none"] = "auto",
        *,
        start_step: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
    ):
        self._stream = stream or sys.stdout
        if mode == "auto":
            mode = "rich" if self._stream.isatty() else "plain"
        self._mode = mode if enabled else "none"
        self._total, self._step = total_steps, start_step
        self._durations: collections.deque[float] = collections.deque(maxlen=20)
        self._since = self._last_line = time.monotonic()
        self._phase, self._phase_since = "", self._since
        self._done: int | None = None
        self._of: int | None = None
        self._tokens: int | None = None
        self._live: Any = None
        self._handlers: list[tuple[logging.StreamHandler, Any]] = []
        if self._mode == "rich":
            self._spinner = Spinner("dots", style="cyan")
            console = Console(file=self._stream, highlight=False)
            self._live = Live(
                get_renderable=self._render, console=console, refresh_per_second=4, transient=True
            )
            old = {sys.stdout, sys.stderr}
            self._live.start()
            # Log lines have to go through the console too, or they would tear the live line.
            for handler in logging.getLogger().handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream in old:
                    self._handlers.append((handler, handler.setStream(sys.stderr)))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done: shows what people watch of its ``metrics``."""
        now = time.monotonic()
        if step > self._step:
            self._durations.append((now - self._since) / (step - self._step))
        self._step, self._since = step, now
        self._phase = ""
        shown = []
        for label, names, text in WATCHED:
            if label == "loss" and "reward/mean" in metrics:
                continue
            value = next((metrics[name] for name in names if metrics.get(name) is not None), None)
            if value is not None:
                shown.append((label, text(float(value))))
        if eta := self.eta():
            shown.append(("ETA", eta))
        self._print_step(shown)

    def update(
        self,
        phase: str,
        *,
        done: int | None = None,
        total: int | None = None,
        tokens: int | None = None,
    ) -> None:
        """Where the current step is: a phase, ``done`` of ``total`` sequences, and ``tokens`` so far."""
        if phase != self._phase:
            self._phase, self._phase_since = phase, time.monotonic()
        self._done, self._of, self._tokens = done, total, tokens
        if self._mode == "plain" and time.monotonic() - self._last_line >= PLAIN_SECONDS:
            self._write(f"  step {self._step + 1} {self._where()}")

    def eta(self) -> str:
        """Time that the remaining steps will take, "1:02:03"; "" before the first step or after the last.

        From the median of the latest steps, so that compilation, evaluations and checkpoints do not upset it.
        """
        if not self._durations or self._step >= self._total:
            return ""
        seconds = statistics.median(self._durations) * (self._total - self._step)
        return str(datetime.timedelta(seconds=round(seconds)))

    def close(self) -> None:
        """Takes the live line away; more than once is fine."""
        if self._live:
            for handler, stream in self._handlers:
                handler.setStream(stream)
            self._live.stop()
            self._live = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _where(self) -> str:
        """The current phase in words: ``rollout 96/256 sequences, 1.2k tok/s, 0:00:41``."""
        elapsed = time.monotonic() - self._phase_since
        parts = [self._phase]
        if self._done is not None:
            of = f"/{self._of}" if self._of else ""
            parts[0] += f" {self._done}{of} sequences"
        if self._tokens and elapsed >= 1:
            parts.append(f"{short(self._tokens / elapsed)} tok/s")
        return ", ".join([*parts, str(datetime.timedelta(seconds=int(elapsed)))])

    def _write(self, line: str) -> None:
        self._last_line = time.monotonic()
        print(line, file=self._stream, flush=True)

    def _print_step(self, shown: list[tuple[str, str]]) -> None:
        width = len(str(self._total))
        head = f"step {self._step:>{width}}/{self._total}"
        if self._mode == "plain":
            self._write("  ".join([head, *(f"{label} {value}" for label, value in shown)]))
        elif self._live:
            line = Text(head, style="bold")
            for label, value in shown:
                line.append(f"  {label} ", style="dim not bold").append(value, style="not bold")
            self._live.console.print(line)

    def _render(self) -> Any:
        """The live line: a bar of the run, time left, and what the current step is doing."""
        steps = f"{self._step}/{self._total}"
        eta = self.eta()
        bar = ProgressBar(self._total, self._step, width=28, complete_style="cyan", finished_style="green")
        cells: list[Any] = [self._spinner, bar, steps]
        cells.append(f"[dim]ETA[/] {eta}" if eta else "")
        cells.append(f"[cyan]{self._where()}[/]" if self._phase else "")
        line = Table.grid(padding=(0, 1))
        line.add_row(*cells)
        return line
