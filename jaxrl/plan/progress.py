"""What is being compiled, for how long."""

from __future__ import annotations

import time

from rich.console import Console


class Progress:
    """A line that counts seconds on a terminal; in a log, a line for each program."""

    def __init__(self, console: Console):
        self._console = console
        self._began: float | None = None
        self._name = ""

    def __enter__(self) -> Progress:
        from rich.progress import Progress as Live
        from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

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
        self._finish()
        self._live.stop()

    def report(self, name: str, number: int, count: int) -> None:
        """Program ``number`` of ``count`` begins."""
        self._finish()
        what = f"compiling {name} ({number} of {count})" if count else name
        self._name, self._began = what, time.monotonic()
        self._task = self._live.add_task(what, total=None)

    def _finish(self) -> None:
        if self._began is not None:
            self._live.remove_task(self._task)
            self._live.console.print(f"{self._name}: {time.monotonic() - self._began:.0f} s", highlight=False)
        self._began = None
