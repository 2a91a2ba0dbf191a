"""A display of the programs that are being compiled, and for how long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress as Live
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn


class Progress:
    """Lines that count seconds on a terminal; in a log, a line for each program that is done."""

    def __init__(self, console: Console):
        self._console = console

    def __enter__(self) -> Progress:
        self._live = Live(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @contextlib.contextmanager
    def report(self, what: str) -> Iterator[None]:
        """While it lasts, ``what`` is done; several may be at once, in threads."""
        task, began = self._live.add_task(what, total=None), time.monotonic()
        yield
        self._live.remove_task(task)
        self._live.console.print(f"{what}: {time.monotonic() - began:.0f} s", highlight=False)
